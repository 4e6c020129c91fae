"""CONTRIBUTING.md's table of changes names files that exist and what stands in them."""

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
TABLE = re.search(r"^\| change \|.*\n\|.*\n((?:\|.*\n)+)", (ROOT / "CONTRIBUTING.md").read_text(), re.MULTILINE)[1]
CHANGES = {cells[1].strip(): cells[2:] for line in TABLE.splitlines() if (cells := re.split(r"(?<!\\)\|", line))}


@pytest.mark.parametrize("change", CHANGES)
def test_what_a_change_touches_stands_where_the_table_says(change):
    where, check, *_ = CHANGES[change]
    quoted, base = re.findall(r"`([^`]+)`", where), ROOT
    files: list[Path] = []
    for name in (one for one in quoted if re.fullmatch(r"[\w./-]+(/|\.[a-z]+)", one)):
        files.append(ROOT / name if "/" in name else base / name)  # without a folder: beside the file before it
        base = files[-1].parent
        assert files[-1].exists(), files[-1]
    assert files
    inside = [path for file in files for path in (file.glob("*.py") if file.is_dir() else [file])]
    texts = "\n".join(path.read_text() for path in inside)
    for name in (one[1] for one in (re.match(r"(\w+)(\(|$)", name) for name in quoted) if one):
        assert re.search(rf"\b{name}\b", texts), f"{name} is in none of {files}"
    for target in re.findall(r"ARGS=(\S+?)`", check):
        assert (ROOT / target).exists(), target
