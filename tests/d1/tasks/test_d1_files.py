"""The tasks on d1's own files, which stay outside the repository: set D1_FILES to the folder that holds them."""

import json
import os
import time
from fractions import Fraction
from pathlib import Path

import pytest

from d1.tasks import load_task
from d1.tasks.maths import equivalent
from dataset.make_problems import countdown_values

if "D1_FILES" not in os.environ:
    pytest.skip("D1_FILES is not set", allow_module_level=True)
FILES = Path(os.environ["D1_FILES"])
TASK_OF = {"countdown": "countdown", "sudoku": "sudoku", "gsm8k": "gsm8k", "math500": "math"}
# What d1's scorer makes of these files, in percent; strict scoring differs by its faults only.
PUBLISHED = {
    ("gsm8k", "128_64"): 69.29,
    ("gsm8k", "256_128"): 76.37,
    ("math500", "128_64"): 26.00,
    ("math500", "256_128"): 32.40,
    ("countdown", "128_64"): 20.70,
    ("countdown", "256_128"): 19.53,
    ("sudoku", "128_64"): 11.72,
    ("sudoku", "256_128"): 6.69,
}


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


@pytest.mark.parametrize(("name", "length"), PUBLISHED)
def test_d1s_generations_score_near_the_published_figures(name, length):
    task = load_task(TASK_OF[name])
    metric = "cells" if name == "sudoku" else "accuracy"
    scores = []
    equivalent("x + 1", "x + 2")  # starts math-verify, which is not timed
    for path in sorted((FILES / "d1_generations").glob(f"{name}_instruct_{length}_*.json")):
        for row in json.loads(path.read_text())["generations"]:
            if row["ground_truth"] is None:  # two negative answers that d1 could not read
                assert name == "gsm8k"
                continue
            start = time.process_time()  # of this process alone: other work does not slow it down
            scores.append(task.score(row["generations"], row)[metric])
            assert time.process_time() - start < 1.0
    assert len(scores) == {"gsm8k": 1128, "math500": 500}.get(name, 256)
    assert 100 * sum(scores) / len(scores) == pytest.approx(PUBLISHED[name, length], abs=4)
