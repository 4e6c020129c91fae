"""Problems that no training uses; more than a test split has, if more can be made."""

from __future__ import annotations

import random
import tempfile
from pathlib import Path
from typing import Any

import numpy as np

from d1.tasks import load_task
from d1.tasks.sudoku import solution_grids
from dataset.make_problems import arithmetic_row, sudoku_puzzles, write_rows
from pocket.arithmetic_traces import training_numbers

NUMBERS = Path(__file__).resolve().parents[2] / "dataset" / "arithmetic_test.jsonl"


def sudoku(count: int, seed: int) -> Any:
    """Rows of `count` new puzzles on the test split's solution grids."""
    solutions = sorted(set(load_task("sudoku").load_rows("test")["ground_truth"]))
    puzzles = sudoku_puzzles(solutions, count, solution_grids(), random.Random(seed))
    return rows_of("sudoku", [{"Puzzle": puzzle, "Solution": solution} for puzzle, solution in puzzles])


def arithmetic(count: int, seed: int) -> Any:
    """Rows of `count` new word problems on the test split's numbers, which are used equally often, up to one."""
    numbers, rng = training_numbers(NUMBERS), np.random.default_rng(seed)
    return rows_of("arithmetic", [arithmetic_row(*numbers[i % len(numbers)], rng=rng) for i in range(count)])


def countdown(count: int, seed: int) -> Any:
    """Rows of the test split, which has every problem of its numbers: `count` of them, or all if there are fewer."""
    rows = load_task("pocket_countdown").load_rows("test")
    return rows.select(sorted(random.Random(seed).sample(range(len(rows)), min(count, len(rows)))))


FRESH = {"sudoku": sudoku, "countdown": countdown, "arithmetic": arithmetic}


def rows_of(task: str, problems: list[dict[str, str]]) -> Any:
    """The rows that a task reads from a file with these problems."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "problems.jsonl"
        write_rows(path, problems)
        return load_task(task).load_rows("test", str(path))
