"""The release is consistent: one version, a citation that GitHub can read, and a page of stable names that exist."""

import importlib
import re
import tomllib

import yaml

from d1.__main__ import COMMANDS, STAGES
from tests.commands import ROOT

PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
CITATION = yaml.safe_load((ROOT / "CITATION.cff").read_text())
STABLE = (ROOT / "docs" / "stable.md").read_text()
ROOMS = ("d1.models", "d1.sampling", "d1.scoring", "d1.sft", "d1.rl", "d1.eval")  # what these export is stable


def rows(first: str) -> dict[str, set[str]]:
    """The rows of the table whose first column has this header: its first cell -> the names in its second."""
    (table,) = re.findall(rf"^\| {first} \|.*\n\|.*\n((?:\|.*\n)+)", STABLE, re.MULTILINE)
    cells = (line.split("|")[1:3] for line in table.splitlines())
    return {key.strip().strip("`"): {*re.findall(r"`(.+?)`", names)} for key, names in cells}


def test_the_version_is_the_same_wherever_it_stands():
    version, date = re.search(r"^## \[(.+?)\] - (\S+)$", (ROOT / "CHANGELOG.md").read_text(), re.MULTILINE).groups()
    assert (version, date) == (CITATION["version"], CITATION["date-released"])
    assert version == PROJECT["version"]
    assert re.fullmatch(r"\d+\.\d+\.\d+", version)


def test_the_citation_has_what_the_citation_file_format_requires():
    """The required fields of schema 1.2.0, of the file and of each reference; an author is a person or a group."""
    assert CITATION["cff-version"] == "1.2.0"
    assert CITATION["license"] == PROJECT["license"]
    for entry in (CITATION, *CITATION["references"]):
        assert isinstance(entry["title"], str)
        assert entry["type"] in ("software", "article")
        for author in entry["authors"]:
            assert author.keys() in ({"name"}, {"given-names", "family-names"})
            assert all(isinstance(name, str) for name in author.values())
    assert isinstance(CITATION["message"], str)
    assert "d1 paper" in CITATION["message"]
    assert CITATION["authors"] == [{"name": "The d1 library authors"}]
    (paper,) = CITATION["references"]
    assert paper["url"] in (ROOT / "README.md").read_text()
    assert len(paper["authors"]) == 4


def test_the_stable_names_are_those_that_the_packages_export():
    listed = rows("import from")
    assert listed == {room: {*importlib.import_module(room).HOMES} for room in ROOMS}
    for room in ROOMS:
        assert all(hasattr(importlib.import_module(room), name) for name in listed[room])
    commands = re.search(r"`d1 NAME`.*?for: (.*?)\. ", STABLE, re.DOTALL)[1]
    assert re.findall(r"`(\w+)`", commands) == [*STAGES, *COMMANDS]
    for folder, files in rows("folder").items():
        assert [(ROOT / folder / file).is_file() for file in files] == [True] * max(1, len(files)), folder
