"""The tasks on d1's own files, which stay outside the repository: set D1_FILES to the folder that holds them."""

import os
from fractions import Fraction
from pathlib import Path

import pytest

from d1.tasks import load_task
from dataset.make_problems import countdown_values

if "D1_FILES" not in os.environ:
    pytest.skip("D1_FILES is not set", allow_module_level=True)
FILES = Path(os.environ["D1_FILES"])


@pytest.mark.parametrize(
    ("name", "file", "count"), [("countdown", "countdown_cd3_test.jsonl", 256), ("sudoku", "4x4_test_sudoku.csv", 500)]
)
def test_d1s_test_sets_load_and_can_be_solved(name, file, count):
    task = load_task(name)
    rows = task.load_rows("test", str(FILES / "d1_testsets" / file))
    assert len(rows) == count
    for row in rows:
        if name == "sudoku":
            assert task.score(task.demonstrate(row), row)["accuracy"] == 1.0
        else:
            numbers, target = row["ground_truth"]
            assert target in countdown_values([Fraction(n) for n in numbers])
