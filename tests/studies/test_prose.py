"""Numbers and orders in the prose of the pages are those of the tables' cells; a planted error fails."""

from __future__ import annotations

from pathlib import Path
from statistics import fmean

import pytest
from scipy.stats import ttest_1samp

from studies import readme
from studies.json_lines import read_lines
from tests.studies import prose

ROOT = Path(__file__).parents[2]
STUDIES = ROOT / "studies"
TABLES = {  # page -> other pages whose tables it names
    "leaderboard": [STUDIES / "factorial" / "README.md"],
    "distill": [STUDIES / "distill" / "README.md"],
    "samplers": [STUDIES / "samplers" / "README.md"],
    "fast_rollouts": [STUDIES / "collapse" / "README.md"],
    "tools": [STUDIES / "tools" / "README.md"],
}
PAGES = tuple(TABLES)


@pytest.mark.parametrize("name", PAGES)
def test_named_numbers_and_orders_are_those_of_the_tables(name):
    page = ROOT / "docs" / f"{name}.md"
    assert prose.check(page, TABLES.get(name, ())) == []
    assert prose.TAG.search(page.read_text())


def test_the_intervals_of_the_results_are_students_over_the_seeds_of_the_pocket_tables():
    """The shorter length comes first in the tables of pocket/RESULTS.md."""
    seeds: dict[str, list[list[float]]] = {}
    for _, header, rows in prose.tables_in(ROOT / "pocket" / "RESULTS.md"):
        if "difference" in header[0]:
            for cells in rows:
                values = [float(cell) for cell in cells[2:5]]
                low, high = ttest_1samp(values, 0).confidence_interval()
                assert prose.numbers(cells[5]) == pytest.approx([fmean(values), low, high], abs=0.051)
            kept = dict.fromkeys(cells[0] for cells in rows)
            firsts = [next(cells for cells in rows if cells[0] == name) for name in kept]
            for cells in firsts:
                seeds.setdefault(cells[0], []).append([float(cell) for cell in cells[2:5]])
    (table,) = (rows for _, header, rows in prose.tables_in(ROOT / "docs" / "results.md") if header[0] == "points")
    assert {cells[0] for cells in table} == seeds.keys()
    for name, *cells in table:
        for cell, values in zip(filter(None, cells), seeds[name], strict=True):
            low, high = ttest_1samp(values, 0).confidence_interval()
            assert prose.numbers(cell) == pytest.approx([fmean(values), low, high], abs=0.051)


def test_the_standard_deviation_of_sft_in_the_readme_is_that_of_eight_seeds():
    seeds: dict[str, list[int]] = {}
    for line in read_lines(readme.EIGHT_SEEDS):
        seeds.setdefault(line["task"], []).append(line["seed"])
    assert {task: sorted(of_task) for task, of_task in seeds.items()} == {task: [*range(8)] for task in readme.BASES}


TABLE = """# Words at 5M

| method | solved, % | minus d1 | rank |
| --- | --- | --- | --- |
| a* | 88.8 [86.9, 90.7] | +19.3 [+16.2, +22.7] | 1, a |
| a+ | 91.2 [90.0, 92.4] | +21.6 [+19.0, +24.2] | 1, a |
| b | 82.9 [75.3, 88.7] | +13.3 [+5.9, +18.8] | 2-3, ab |
| d1 | 69.6 [66.0, 72.8] | | 3, b |
"""


@pytest.mark.parametrize(
    ("right", "planted"),
    [
        ("a has 88.8 [86.9, 90.7]<!--words/a-->.", "d1 has 88.8 [86.9, 90.7]<!--words/d1-->."),
        ("a+ has 91.2<!--words/a-plus-->", "a has 91.2<!--words/a-plus-->"),
        ("a has 88.8%<!--words/a/solved-->.", "d1 has 88.8%<!--words/a/solved-->."),
        ("a gains 19.3 [16.2, 22.7]<!--words/a/minus-->", "a gains 19.3 [16.2, 22.8]<!--words/a/minus-->"),
        ("a: -19.3 [-22.7, -16.2]<!--neg:words/a/minus-->", "a: 19.3 [16.2, 22.7]<!--neg:words/a/minus-->"),
        ("a is one<!--words/a/rank-->", "a is two<!--words/a/rank-->"),
        ("a: up to 90.7<!--words/a#3-->", "a: up to 90.7<!--words/a#2-->"),
        ("a is above b<!--above:words/a:words/b-->", "d1 is above b<!--above:words/d1:words/b-->"),
        ("separated<!--separated:words/a:words/d1-->", "separated<!--separated:words/a:words/b-->"),
        ("not separated<!--tied:words/b:words/d1-->", "not separated<!--tied:words/a:words/d1-->"),
        ("a: 88.8<!--words/a-->", "a: 88.8<!--words/c-->"),
    ],
)
def test_a_planted_number_or_order_is_found(right, planted, tmp_path):
    page = tmp_path / "page.md"
    for text, fine in ((right, True), (planted, False)):
        page.write_text(f"{TABLE}\n\n{text}\n")
        assert (prose.check(page) == []) == fine, text


def test_a_number_or_an_order_without_a_name_is_found():
    text = "Ours has 88.8<!--words/a--> and `x = 0.5`. "
    assert prose.unnamed(text) == []
    assert prose.unnamed(text + "It gains 19.3.") == ["19.3"]
    assert prose.unnamed(text + "It is above d1.") == ["It is above d1."]
    assert prose.unnamed(text + "It is above d1<!--above:words/a:words/d1-->.") == []
