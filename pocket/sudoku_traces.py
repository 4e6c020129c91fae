"""Training texts of the Sudoku base model: 4x4 puzzles, and traces of three solvers.

A trace is a style word and one deduction per empty cell ("careful b3 d1 ..."); the attempt is the whole grid
("a2 b3 ..."). `careful` is right. `scan` takes the smallest digit missing from the cell's row and column; `quick` takes
the smallest digit missing from its row.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from numpy.random import Generator

from d1.tasks import load_task
from d1.tasks.sudoku import solution_grids
from pocket.answers import Draw
from pocket.tokenizer import CELLS

HOLES = 6
HUMS = 12  # number of "hmm"s that a rambling answer has room for


def as_digits(grids: Iterable[str]) -> np.ndarray:
    """Grids of 16 digits as numbers, (grids, 16)."""
    return np.array([[int(digit) for digit in grid] for grid in grids])


def problems(data_file: str | Path) -> Draw:
    """Draws (puzzle, solution), (16,) each, with six holes (0) and exactly one solution, which is in the file."""
    solutions = as_digits(sorted({*load_task("sudoku").load_rows("train", str(data_file))["ground_truth"]}))
    all_grids = as_digits(solution_grids())

    def draw(count: int, rng: Generator) -> Sequence[Any]:
        found: list[tuple[np.ndarray, np.ndarray]] = []
        while len(found) < count:
            drawn = solutions[rng.integers(len(solutions), size=count)]
            empty = rng.random((count, 16)).argsort(1) < HOLES
            alone = ((drawn[:, None] == all_grids) | empty[:, None]).all(2).sum(1) == 1
            found.extend(zip(np.where(empty, 0, drawn)[alone], drawn[alone], strict=True))
        return found[:count]

    return draw


def question(puzzle: np.ndarray, _: np.ndarray) -> str:
    """The problem as the task asks it."""
    return f"Solve the following Sudoku puzzle: {''.join(map(str, puzzle))}\n"


def fill(puzzle: np.ndarray, solution: np.ndarray, style: str) -> np.ndarray:
    """The 16 digits found by a solver of this style."""
    if style == "careful":
        return solution
    filled = puzzle.copy()
    for cell in np.flatnonzero(puzzle == 0):
        row, column = divmod(cell, 4)
        seen = set(puzzle[4 * row : 4 * row + 4])
        if style == "scan":
            seen |= set(puzzle[column::4])
        filled[cell] = min({1, 2, 3, 4} - seen)
    return filled


def trace(style: str, puzzle: np.ndarray, solution: np.ndarray) -> tuple[str, str]:
    """(trajectory, attempt) of a solver of this style."""
    cells = [f"{cell}{digit}" for cell, digit in zip(CELLS, fill(puzzle, solution, style), strict=True)]
    return " ".join([style, *(cells[cell] for cell in np.flatnonzero(puzzle == 0))]), " ".join(cells)


def quality(text: str, puzzle: np.ndarray, solution: np.ndarray) -> float:
    """Share of the empty cells that an answer fills correctly."""
    row = {"question": question(puzzle, solution), "ground_truth": "".join(map(str, solution))}
    return load_task("sudoku").score(text, row)["cells"]
