"""Problems that no training has seen, more of them than a test split has where more can be made."""

from __future__ import annotations

import csv
import json
import random
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "dataset"))
sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "pocket"))

from arithmetic_traces import training_numbers
from make_problems import arithmetic_row, sudoku_puzzles

from d1.tasks import load_task
from d1.tasks.sudoku import solution_grids

NUMBERS = Path(__file__).resolve().parents[1] / "dataset" / "arithmetic_test.jsonl"


def sudoku(count: int, seed: int) -> Any:
    """Rows of `count` new puzzles on the test split's solution grids."""
    solutions = sorted(set(load_task("sudoku").load_rows("test")["ground_truth"]))
    puzzles = sudoku_puzzles(solutions, count, solution_grids(), random.Random(seed))
    return rows_of("sudoku", ["Puzzle", "Solution"], puzzles)


def arithmetic(count: int, seed: int) -> Any:
    """Rows of `count` new word problems on the test split's numbers, as often each as the others, to within one."""
    numbers, rng = training_numbers(NUMBERS), np.random.default_rng(seed)
    drawn = [arithmetic_row(*numbers[i % len(numbers)], rng=rng) for i in range(count)]
    return rows_of("arithmetic", ["question", "answer"], [(row["question"], row["answer"]) for row in drawn])


def countdown(count: int, seed: int) -> Any:
    """Rows of the test split, which has every problem of its numbers: `count` of them, or all if there are fewer."""
    rows = load_task("pocket_countdown").load_rows("test")
    return rows.select(sorted(random.Random(seed).sample(range(len(rows)), min(count, len(rows)))))


FRESH = {"sudoku": sudoku, "countdown": countdown, "arithmetic": arithmetic}


def rows_of(task: str, columns: Sequence[str], values: Sequence[Sequence[str]]) -> Any:
    """The rows that a task reads from a file with these columns."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / ("problems.csv" if task == "sudoku" else "problems.jsonl")
        with path.open("w", newline="") as file:
            if task == "sudoku":
                csv.writer(file).writerows([columns, *values])
            else:
                file.writelines(json.dumps(dict(zip(columns, row, strict=True))) + "\n" for row in values)
        return load_task(task).load_rows("test", str(path))
