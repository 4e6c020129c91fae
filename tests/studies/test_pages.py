"""The pages of the studies: what `make studies` writes is there, from the data in the repository."""

from __future__ import annotations

import re

import pytest

from studies.leaderboard.plan import FULL
from studies.leaderboard.report import PAGE, page
from studies.leaderboard.results import read_results
from studies.leaderboard.tables import tables_of
from studies.pages import WRITTEN, reading, write, written
from studies.write import STUDIES


@pytest.mark.parametrize("parts", STUDIES, ids=lambda parts: parts.__module__.split(".")[1])
def test_a_page_has_the_tables_of_the_data(parts):
    pages = parts()
    assert pages
    for path, text in pages.items():
        assert written(path) == text, f"{path} is older than its data: make studies"


def test_the_page_of_the_leaderboard_has_the_tables_of_the_data():
    results = read_results(final_table=True)
    tables = [*tables_of(results, FULL)]
    assert PAGE.read_text() == page(results, tables, FULL, PAGE)


def test_what_the_leaderboard_says_by_hand_has_only_numbers_of_its_tables():
    by_hand = reading(PAGE)
    number = re.compile(r"\d+\.\d+")
    tables = PAGE.read_text().replace(by_hand, "")
    assert set(number.findall(by_hand)) <= set(number.findall(tables))


def test_only_the_written_part_changes(tmp_path):
    path = tmp_path / "page.md"
    path.write_text(f"# A title\n\n{WRITTEN}\n\n| a |\n<!-- end -->\n\nThe rest.\n")
    write(path, "| b |\n")
    assert path.read_text() == f"# A title\n\n{WRITTEN}\n\n| b |\n<!-- end -->\n\nThe rest.\n"
    path.write_text("# No place\n")
    with pytest.raises(ValueError, match="has no part between"):
        write(path, "| b |\n")
