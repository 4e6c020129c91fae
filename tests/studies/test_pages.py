"""The pages of the studies: what `make studies` writes is there, from the data in the repository."""

from __future__ import annotations

import re
import xml.etree.ElementTree as ET
from pathlib import Path

import pytest

from studies.estimators import report as estimators
from studies.leaderboard.figures import apart, draw_curves, draw_places
from studies.leaderboard.plan import FULL, START, read_results
from studies.leaderboard.report import PAGE, answer, of_every_setup, page
from studies.leaderboard.tables import tables_of
from studies.pages import WRITTEN, reading, write, written
from studies.samplers import frontier_report
from studies.write import STUDIES

DOCS = Path(__file__).parents[2] / "docs"
PAGE_WIDTH = 700  # px


@pytest.fixture(scope="module")
def board():
    """The lines of all runs and the tables of the board."""
    results = read_results(final_table=True)
    return results, [*tables_of(results, FULL)]


@pytest.mark.parametrize("parts", STUDIES, ids=lambda parts: parts.__module__.split(".")[1])
def test_a_page_has_the_tables_of_the_data(parts):
    pages = parts()
    assert pages
    for path, text in pages.items():
        assert written(path) == text, f"{path} is older than its data: make studies"


def test_the_page_of_the_leaderboard_has_the_tables_of_the_data(board):
    results, tables = board
    assert PAGE.read_text() == page(results, tables, FULL, PAGE)


def test_what_the_leaderboard_says_by_hand_has_only_numbers_of_its_tables():
    by_hand = reading(PAGE)
    number = re.compile(r"\d+\.\d+")
    tables = PAGE.read_text().replace(by_hand, "")
    assert set(number.findall(by_hand)) <= set(number.findall(tables))


def texts(path):
    return [text for one in ET.parse(path).iter("{http://www.w3.org/2000/svg}text") if (text := one.text)]


def test_the_figures_are_those_of_the_data(board, tmp_path):
    shown = of_every_setup(board[1], FULL)
    draw_places(shown, tmp_path / "leaderboard.svg")
    draw_curves(shown, tmp_path / "leaderboard_curves.svg")
    estimators.figure(tmp_path / "estimators.svg")
    frontier_report.figure(tmp_path / "samplers.svg")
    drawn = sorted(tmp_path.iterdir())
    assert len(drawn) == 4
    for path in drawn:
        assert texts(path) == texts(DOCS / path.name), f"{path.name} is older than its data: make studies"
    names = [name for table in shown for name in table.places if name != START]
    there = [text.rstrip("*") for text in texts(tmp_path / "leaderboard.svg")]
    assert sorted(text for text in there if text in names) == sorted(names)  # each next to its points
    assert not any("hollow" in text for text in there)


@pytest.mark.parametrize("path", sorted(DOCS.glob("*.svg")), ids=lambda path: path.stem)
def test_a_figure_is_legible_on_a_page_light_or_dark(path):
    text = path.read_text(encoding="utf-8")
    head = ET.fromstring(text)
    own = float(head.get("width").removesuffix("pt")) * (4 / 3 if head.get("width").endswith("pt") else 1)
    scale = min(own, PAGE_WIDTH) / float(head.get("viewBox").split()[2])
    sizes = [float(size) for size in re.findall(r"""font(?:-size)?[:=]["' ]*(?:\w+ )?([\d.]+)""", text)]
    assert sizes
    assert min(sizes) * scale >= 10
    assert "@media(prefers-color-scheme:dark)" in text
    assert 'class="card"' in text


@pytest.mark.parametrize("name", ["leaderboard", "estimators", "samplers", "preference", "distill"])
def test_a_page_begins_with_its_answer(name):
    _, first, rest = (DOCS / f"{name}.md").read_text().split("\n\n", 2)
    assert re.match(r"\*\*(Start with|Leave|.* start with) ?`?\w+", first)
    assert {*re.findall(r"\d+\.\d+", first)} <= {*re.findall(r"\d+\.\d+", rest)}


def test_what_to_start_with_is_counted_in_the_tables(board):
    _, tables = board
    pages = PAGE.read_text().split("\n## ")
    rows = [part.splitlines()[4:] for part in pages if re.match(r"\w+ from \w+, [\d,]+ tokens", part)]
    assert len(rows) == len(tables) == 8
    best = [next(line.split(" | ")[0] for line in part if "*" not in line)[2:] for part in rows]
    method = max(set(best), key=best.count)
    assert f"**Start with `{method}`.**" in PAGE.read_text().split("\n\n")[1]
    assert f"highest mean in {best.count(method)} of 8" in PAGE.read_text()
    assert f"(`rldf` in {best.count('rldf')}: sudoku from base)" in answer(tables)
    assert answer([]) == ""


def test_names_keep_their_distance_and_stay_near_their_curves():
    assert apart([0.1, 0.5, 0.9], 0.2) == pytest.approx([0.1, 0.5, 0.9])
    assert apart([0.5, 0.5], 0.2) == pytest.approx([0.4, 0.6])
    assert apart([0.5, 0.51, 0.9], 0.1) == pytest.approx([0.455, 0.555, 0.9])
    assert apart([], 0.1) == []


def test_only_the_written_part_changes(tmp_path):
    path = tmp_path / "page.md"
    path.write_text(f"# A title\n\n{WRITTEN}\n\n| a |\n<!-- end -->\n\nThe rest.\n")
    write(path, "| b |\n")
    assert path.read_text() == f"# A title\n\n{WRITTEN}\n\n| b |\n<!-- end -->\n\nThe rest.\n"
    path.write_text("# No place\n")
    with pytest.raises(ValueError, match="has no part between"):
        write(path, "| b |\n")
