"""4x4 Sudoku: 16 digits row by row, 0 for an empty cell; each row, column and 2x2 box holds 1 to 4 once."""

from __future__ import annotations

import re
from collections.abc import Sequence
from itertools import permutations
from typing import Any

from datasets import Dataset

from d1.tasks import Completion, final_answer, format_completion, problem, reward_each
from d1.tasks.data import TEXT, file_of, read_file, task_rows

INSTRUCTIONS = (
    "The string below is a 4x4 Sudoku read row by row, with 0 for each empty cell. Fill the empty cells so that "
    "every row, every column and every 2x2 box contains each of 1, 2, 3 and 4 exactly once."
)
ANSWER = "the full grid as 16 digits, row by row,"

_PUZZLE = re.compile(r"(?<![0-9])[0-4]{16}(?![0-9])")
_UNITS = [
    *((row, row + 1, row + 2, row + 3) for row in (0, 4, 8, 12)),
    *((column, column + 4, column + 8, column + 12) for column in range(4)),
    *((box, box + 1, box + 4, box + 5) for box in (0, 2, 8, 10)),
]


def load_rows(split: str, data_file: str | None = None) -> Dataset:
    """Puzzles of `dataset/sudoku_{split}.csv`, whose splits share no solution grid, or of `data_file`.

    The columns are d1's: `Puzzle`, `Solution`.
    """
    path = file_of(split, data_file, "sudoku_{}.csv")
    return task_rows(path, read_file(path, ("Puzzle", "Solution")), _task_row, TEXT)


def _task_row(row: dict[str, Any]) -> dict[str, Any]:
    puzzle, solution = str(row["Puzzle"]), str(row["Solution"])
    if not _PUZZLE.fullmatch(puzzle) or "0" not in puzzle:
        raise ValueError(f"Puzzle must be 16 digits 0-4 with an empty cell (0), got {puzzle!r}")
    if not _solves(solution, puzzle):
        raise ValueError(f"Solution {solution!r} does not solve {puzzle!r}")
    return problem(f"Solve the following Sudoku puzzle: {puzzle}\n", INSTRUCTIONS, ANSWER, solution)


def extract(text: str) -> str | None:
    """The digits of the answer, in order, without anything between them, or None if there are none."""
    return re.sub(r"[^0-9]", "", final_answer(text) or "") or None


def score(text: str, row: dict[str, Any]) -> dict[str, float]:
    """`accuracy`: 1 if the whole grid is right, else 0; `cells`: share of the originally empty cells that are right.

    A complete grid that keeps the givens and obeys the rules is right even if it differs from the stored solution.
    """
    exact, cells = _grade(extract(text), puzzle_of(row["question"]), row["ground_truth"])
    return {"accuracy": float(exact), "cells": cells}


def cells_reward(
    completions: Sequence[Completion], question: Sequence[str], ground_truth: Sequence[str], **columns: Any
) -> list[float]:
    """Share of the originally empty cells that are right (d1's Sudoku reward); 1 for another solution of the puzzle."""

    def share(text: str, row_question: str, truth: str) -> float:
        return _grade(extract(text), puzzle_of(row_question), truth)[1]

    return reward_each(completions, share, question, ground_truth)


REWARDS = [cells_reward]


def demonstrate(row: dict[str, Any]) -> str:
    """A worked solution, which always continues with the cell that has the fewest possible digits left."""
    grid = list(puzzle_of(row["question"]))
    solution = row["ground_truth"]
    steps = []
    while "0" in grid:
        # The digits that each empty cell may still have.
        possible = {}
        for cell, digit in enumerate(grid):
            if digit == "0":
                used: set[str] = set()
                for unit in _UNITS:
                    if cell in unit:
                        used.update(grid[neighbour] for neighbour in unit)
                possible[cell] = set("1234") - used
        # A cell with one possible digit comes first, so that the text of most steps is a proof.
        cell = min(possible, key=lambda cell: (len(possible[cell]), cell))
        grid[cell] = solution[cell]
        reason = "only"
        if len(possible[cell]) > 1:
            reason = f"of {' and '.join(sorted(possible[cell]))}, only"
        steps.append(f"Row {cell // 4 + 1}, column {cell % 4 + 1}: {reason} {grid[cell]} works.")
    return format_completion("\n".join(steps), solution)


def solution_grids() -> list[str]:
    """All 288 solved grids as 16 digits, row by row, in lexicographic order."""
    rows = ["".join(row) for row in permutations("1234")]
    grids = [""]
    for _ in range(4):
        grids = [grid + row for grid in grids for row in rows if _has_no_repeats(grid + row)]
    return grids


def _has_no_repeats(grid: str) -> bool:
    """Whether no unit of a grid, of which the last rows may be missing, has a digit twice."""
    for unit in _UNITS:
        digits = [grid[cell] for cell in unit if cell < len(grid)]
        if len(set(digits)) < len(digits):
            return False
    return True


def puzzle_of(question: str) -> str:
    """The 16 digits of the puzzle that a question asks to solve."""
    grids = _PUZZLE.findall(question)
    if not grids:
        raise ValueError(f"no puzzle of 16 digits 0-4 in the question {question[:200]!r}")
    return grids[-1]


def _grade(grid: str | None, puzzle: str, solution: str) -> tuple[bool, float]:
    """(solved, share of empty cells right); a grid of more than 16 digits is not solved, but its cells still count."""
    grid = grid or ""
    if _solves(grid, puzzle):
        return True, 1.0
    empty = [cell for cell, digit in enumerate(puzzle) if digit == "0"]
    if not empty:
        return False, 0.0
    right_cells = sum(cell < len(grid) and grid[cell] == solution[cell] for cell in empty)
    return False, right_cells / len(empty)


def _solves(grid: str, puzzle: str) -> bool:
    """Whether a grid of 16 digits obeys the rules and keeps the puzzle's givens."""
    if len(grid) != 16:
        return False
    for unit in _UNITS:
        if {grid[cell] for cell in unit} != set("1234"):
            return False
    return all(clue in ("0", digit) for clue, digit in zip(puzzle, grid, strict=True))


# LLaDA was not evaluated on these puzzles; this is the form of its prompts: only the question.
PROTOCOLS = {"llada": {"QUESTION": "{question}"}}
