"""The pages of the studies: they have what `make studies` writes from the data, and the data's own means."""

from __future__ import annotations

import re
import xml.etree.ElementTree as ET
from collections import Counter, defaultdict
from pathlib import Path

import numpy as np
import pytest

from studies.estimators import report as estimators
from studies.factorial import report as factorial
from studies.json_lines import read_lines
from studies.ladder import report as ladder
from studies.leaderboard import report as leaderboard
from studies.leaderboard.figures import draw_curves, draw_places
from studies.leaderboard.plan import CANDIDATES, DATA, FULL, SETUPS, START, read_results
from studies.leaderboard.tables import tables_of
from studies.reports import written_part
from studies.samplers import frontier_report
from studies.write import STUDIES

DOCS = Path(__file__).parents[2] / "docs"
PAGE_WIDTH = 700  # px


@pytest.fixture(scope="module")
def board():
    """The lines of all runs and the tables of the board."""
    results = read_results(final_table=True)
    return results, [*tables_of(results, FULL)]


def check_pages(pages):
    assert pages
    for path, text in pages.items():
        assert written_part(path) == text, f"{path} is older than its data: make studies"


@pytest.mark.parametrize("parts", STUDIES, ids=lambda parts: parts.__module__.split(".")[1])
def test_a_page_has_the_tables_of_the_data(parts):
    check_pages(parts())


def test_the_pages_of_the_leaderboard_have_the_tables_of_the_data(board):
    pages = leaderboard.parts(*board)
    check_pages(pages)


@pytest.fixture(scope="module")
def outcomes():
    """(setup, budget) -> method -> seed -> the share of sealed problems solved, from the raw lines."""
    found = defaultdict(lambda: defaultdict(dict))
    for line in read_lines(DATA / "final.jsonl"):
        right = line["sealed"]["exact"]
        found[line["task"], line["start"], line["budget"]][line["method"]][line["seed"]] = right.count("1") / len(right)
    return found


def test_the_tables_and_the_candidates_differences_have_the_means_of_the_lines(outcomes, board):
    """Differences are of the seeds that both have."""
    _, tables = board
    assert len(tables) == 8
    for table in tables:
        of = outcomes[*table.setup, table.budget]
        for name, place in table.places.items():
            if name == START:
                continue
            assert place.seeds == len(of[name]) == (3 if name in table.few else 8)
            assert place.solved.value == pytest.approx(np.mean([*of[name].values()]))
            assert place.less.value == pytest.approx(np.mean([of[name][seed] - of["d1"][seed] for seed in of[name]]))
            assert (name in table.order.ranks) == (place.seeds == 8)
        solved = [place.solved.value for place in table.places.values()]
        assert solved == sorted(solved, reverse=True)
    (candidate,) = CANDIDATES
    row = re.compile(rf"^\| {candidate} \| (.+), ([\d,]{{9}}) \| (.+) \| (\S+) \[", re.MULTILINE)
    found = row.findall(leaderboard.SEARCH.read_text())
    published = Counter(name for table in tables for name in table.places if name not in (START, candidate))
    assert Counter(other for _, _, other, _ in found) == published
    for setup, budget, other, difference in found:
        of = outcomes[*SETUPS[setup], int(budget.replace(",", ""))]
        shared = [of[candidate][seed] - of[other][seed] for seed in of[other]]
        assert float(difference) == pytest.approx(100 * np.mean(shared), abs=0.051)


def texts(path):
    return [text for one in ET.parse(path).iter("{http://www.w3.org/2000/svg}text") if (text := one.text)]


def test_the_figures_are_those_of_the_data(board, tmp_path):
    shown = leaderboard.of_every_setup(board[1], FULL)
    draw_places(shown, tmp_path / "leaderboard.svg")
    draw_curves(shown, tmp_path / "leaderboard_curves.svg")
    estimators.figure(tmp_path / "estimators.svg")
    factorial.figure(read_lines(factorial.DATA / "runs.jsonl"), tmp_path / "factorial.svg")
    frontier_report.figure(tmp_path / "samplers.svg")
    sizes = {line["width"]: line["parameters"] for line in read_lines(ladder.DATA / "bases.jsonl")}
    ladder.figure(read_lines(ladder.RUNS), sizes, tmp_path / "ladder.svg")
    drawn = sorted(tmp_path.iterdir())
    assert len(drawn) == 6
    for path in drawn:
        assert texts(path) == texts(DOCS / path.name), f"{path.name} is older than its data: make studies"
    names = [name for table in shown for name in table.places if name != START]
    there = [text.rstrip("*") for text in texts(tmp_path / "leaderboard.svg")]
    assert sorted(text for text in there if text in names) == sorted(names)  # each next to its points


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
