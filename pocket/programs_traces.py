"""Training texts of the programs base model: two examples of each training function, and traces of three solvers.

A trace says for each letter of f(x) which letter of x it is ("careful y[0]=x[3] y[1]=x[0] ..."), an attempt is the
expression ("x[3] + x[0] + x[0] + x[2] + x[1]"). `careful` is right. `scan` counts the index of the last letter from the
wrong end, `quick` those of the last two.
"""

from __future__ import annotations

from pathlib import Path

from d1.tasks import answer_block
from d1.tasks.data import read_file
from d1.tasks.programs import COLUMNS, INPUTS, LETTERS, Function, program_of, question_of, read_row
from pocket.answers import Draw

HUMS = 8  # number of "hmm"s that a rambling answer has room for


def problems(data_file: str | Path) -> Draw:
    """Draws (function,) from the problems of a file."""
    known = [read_row(row)[1] for row in read_file(str(data_file), COLUMNS)]
    return lambda count, rng: [(known[i],) for i in rng.integers(len(known), size=count)]


def question(function: Function) -> str:
    """The problem as the task asks it."""
    return question_of(INPUTS, function)


def solve(function: Function, style: str) -> Function:
    """The function that a solver of this style finds."""
    wrong = {"careful": 0, "scan": 1, "quick": 2}[style]
    right = LETTERS - wrong
    return (*function[:right], *(LETTERS - 1 - index for index in function[right:]))


def trace(style: str, function: Function) -> tuple[str, str]:
    """(trajectory, attempt) of a solver of this style."""
    found = solve(function, style)
    return " ".join([style, *(f"y[{i}]=x[{index}]" for i, index in enumerate(found))]), program_of(found)


def quality(text: str, function: Function) -> float:
    """Share of the letters that an answer takes from the right index."""
    found, right = (answer_block(text) or "").split(" + "), program_of(function).split(" + ")
    return sum(a == b for a, b in zip(found, right, strict=False)) / len(right)
