"""The pages of the studies: they have what `make studies` writes from the data, and legible figures."""

from __future__ import annotations

import re
import xml.etree.ElementTree as ET
from pathlib import Path

import pytest

from studies.factorial import report as factorial
from studies.json_lines import read_lines
from studies.reports import written_part
from studies.samplers import frontier_report
from studies.write import STUDIES

DOCS = Path(__file__).parents[2] / "docs"
PAGE_WIDTH = 700  # px


@pytest.mark.parametrize("parts", STUDIES, ids=lambda parts: parts.__module__.split(".")[1])
def test_a_page_has_the_tables_of_the_data(parts):
    pages = parts()
    assert pages
    for path, text in pages.items():
        assert written_part(path) == text, f"{path} is older than its data: make studies"


def texts(path):
    return [text for one in ET.parse(path).iter("{http://www.w3.org/2000/svg}text") if (text := one.text)]


def test_the_figures_are_those_of_the_data(tmp_path):
    factorial.figure(read_lines(factorial.DATA / "runs.jsonl"), tmp_path / "factorial.svg")
    frontier_report.figure(tmp_path / "samplers.svg")
    drawn = sorted(tmp_path.iterdir())
    assert len(drawn) == 2
    for path in drawn:
        assert texts(path) == texts(DOCS / path.name), f"{path.name} is older than its data: make studies"


@pytest.mark.parametrize("path", sorted(DOCS.glob("*.svg")), ids=lambda path: path.stem)
def test_a_figure_is_legible_on_a_page_light_or_dark(path):
    text = path.read_text(encoding="utf-8")
    head = ET.fromstring(text)
    own = float(head.get("width").removesuffix("pt")) * (4 / 3 if head.get("width").endswith("pt") else 1)
    scale = min(own, PAGE_WIDTH) / float(head.get("viewBox").split()[2])
    sizes = [float(size) for size in re.findall(r"""font(?:-size)?[:=]["' ]*(?:\w+ )?([\d.]+)""", text)]
    assert min(sizes) * scale >= 10
    assert "@media(prefers-color-scheme:dark)" in text
    assert 'class="card"' in text
