"""What the pocket model reads: 4x4 Sudoku puzzles and the traces of three kinds of solvers, as text.

A trace is a style word and one deduction an empty cell ("careful b3 d1 ..."); an attempt is the whole grid
("a2 b3 ..."). `careful` is right. `scan` takes the smallest digit missing from the cell's row and column, `quick` the
smallest missing from its row.
"""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

import numpy as np
from numpy.random import Generator

from d1.tasks import load_task
from pocket.answers import completion, mixture
from pocket.tokenizer import CELLS

ROOT = Path(__file__).resolve().parent.parent
HOLES = 6


def as_digits(grids: Iterable[str]) -> np.ndarray:
    """Grids of 16 digits as numbers, (grids, 16)."""
    return np.array([[int(digit) for digit in grid] for grid in grids])


def training_grids(data_file: str | Path) -> np.ndarray:
    """The solutions of a training problem set (columns Puzzle,Solution), each once, (grids, 16)."""
    solutions = set(load_task("sudoku").load_rows("train", str(data_file))["ground_truth"])
    return as_digits(sorted(solutions))


def draw_puzzles(
    solutions: np.ndarray, count: int, all_grids: np.ndarray, rng: Generator
) -> tuple[np.ndarray, np.ndarray]:
    """`count` puzzles of six holes and exactly one solution, and their solutions, both (count, 16); 0 is empty."""
    puzzles: list[np.ndarray] = []
    answers: list[np.ndarray] = []
    while len(puzzles) < count:
        drawn = solutions[rng.integers(len(solutions), size=count)]
        empty = rng.random((count, 16)).argsort(1) < HOLES
        agree = ((drawn[:, None] == all_grids) | empty[:, None]).all(2).sum(1)
        puzzles.extend(np.where(empty, 0, drawn)[agree == 1])
        answers.extend(drawn[agree == 1])
    return np.array(puzzles[:count]), np.array(answers[:count])


def fill(puzzle: np.ndarray, solution: np.ndarray, style: str) -> np.ndarray:
    """The 16 digits that a solver of this style arrives at."""
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


def write_cells(digits: np.ndarray, cells: np.ndarray | range = range(16)) -> str:
    """e.g. "a2 b3": the given cells with their digits."""
    return " ".join(f"{CELLS[cell]}{digits[cell]}" for cell in cells)


def trace(puzzle: np.ndarray, filled: np.ndarray, style: str) -> tuple[str, str]:
    """(trajectory, attempt) of a solver of this style."""
    return f"{style} {write_cells(filled, np.flatnonzero(puzzle == 0))}", write_cells(filled)


def careful_completion(puzzle: np.ndarray, solution: np.ndarray, rng: Generator) -> str:
    """The right answer; `rng` is not used."""
    return completion(*trace(puzzle, solution, "careful"))


def mixed_completion(puzzle: np.ndarray, solution: np.ndarray, rng: Generator) -> str:
    """One answer of the mixture that web text is taken to be."""
    return mixture(lambda style: trace(puzzle, fill(puzzle, solution, style), style), rng)


def question(puzzle: np.ndarray, _: np.ndarray) -> str:
    """As the task asks it."""
    return f"Solve the following Sudoku puzzle: {''.join(map(str, puzzle))}\n"


def cells_right(text: str, puzzle: np.ndarray, solution: np.ndarray) -> float:
    """Share of the empty cells that an answer fills as the solution does."""
    row = {"question": question(puzzle, solution), "ground_truth": "".join(map(str, solution))}
    return load_task("sudoku").score(text, row)["cells"]
