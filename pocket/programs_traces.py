"""What the programs base reads: examples of training functions and the traces of three kinds of solvers.

A trace says for each letter of f(x) which letter of x it is ("careful y[0]=x[3] y[1]=x[0] ..."), an attempt is the
expression ("x[3] + x[0] + x[0] + x[2]"). `careful` reads both examples and is right. `scan` reads the first alone and
takes the first place with the letter, `quick` the second alone and the last place.
"""

from __future__ import annotations

from pathlib import Path

from d1.tasks import answer_block
from d1.tasks.data import read_file
from d1.tasks.programs import COLUMNS, Function, asked, draw_inputs, program_of, read_row, value_at
from pocket.answers import Draw

HUMS = 7  # what a rambling answer has room for


def problems(data_file: str | Path) -> Draw:
    """Draws the functions of a file with new examples."""
    known = sorted({read_row(row)[1] for row in read_file(str(data_file), COLUMNS)})
    return lambda count, rng: [(draw_inputs(rng), known[i]) for i in rng.integers(len(known), size=count)]


def question(inputs: tuple[str, str], function: Function) -> str:
    """As the task asks it."""
    return asked(inputs, function)


def solve(inputs: tuple[str, str], function: Function, style: str) -> Function:
    """The function that a solver of this style finds."""
    if style == "careful":
        return function
    if style == "scan":
        return tuple(inputs[0].index(letter) for letter in value_at(function, inputs[0]))
    return tuple(inputs[1].rindex(letter) for letter in value_at(function, inputs[1]))


def trace(style: str, inputs: tuple[str, str], function: Function) -> tuple[str, str]:
    """(trajectory, attempt) of a solver of this style."""
    found = solve(inputs, function, style)
    return " ".join([style, *(f"y[{i}]=x[{place}]" for i, place in enumerate(found))]), program_of(found)


def quality(text: str, inputs: tuple[str, str], function: Function) -> float:
    """Share of the letters that an answer takes from the right place."""
    found, right = (answer_block(text) or "").split(" + "), program_of(function).split(" + ")
    return sum(a == b for a, b in zip(found, right, strict=False)) / len(right)
