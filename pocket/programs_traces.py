"""What the programs base reads: examples of training functions and the traces of three kinds of solvers.

A trace goes from f(0) to f(3) by differences ("careful 2 + 3 = 5 ; 5 + 3 = 8 ; 8 + 3 = 11"), an attempt is the
expression ("x * 3 + 2"). `careful` is right. `scan` takes every function for a line through the first two examples,
`quick` also takes every line for a rising one.
"""

from __future__ import annotations

from itertools import product
from pathlib import Path

from numpy.random import Generator

from d1.tasks import answer_block
from d1.tasks.data import read_file
from d1.tasks.programs import COLUMNS, INPUTS, LARGEST, Function, asked, functions
from pocket.answers import Draw

HUMS = 12  # what a rambling answer has room for
BY_EXAMPLES = {one.examples: one for one in functions()}
SOLVED = [Function(*one) for one in product(("rising", "falling", "square"), range(13), range(LARGEST + 1))]
BY_TEXT = {one.text: one for one in SOLVED}


def problems(data_file: str | Path) -> Draw:
    """Draws the examples of a file's functions."""
    outputs = read_file(str(data_file), COLUMNS)["output"]
    given = {tuple(map(int, output.split(",")[1:4])) for output in outputs}
    known = [(examples,) for examples in BY_EXAMPLES if examples in given]

    def draw(count: int, rng: Generator) -> list[tuple[tuple[int, ...]]]:
        return [known[i] for i in rng.integers(len(known), size=count)]

    return draw


def question(examples: tuple[int, ...]) -> str:
    """As the task asks it."""
    return asked(examples)


def solve(examples: tuple[int, ...], style: str) -> tuple[Function, str, list[int]]:
    """The function that a solver of this style finds, and the sign and the three differences of its trace."""
    right, (first, second, _) = BY_EXAMPLES[examples], examples
    sign, slope = "+" if second > first else "-", abs(second - first)
    if style == "careful":
        return right, sign, [slope - 2, slope, slope + 2] if right.kind == "square" else [slope] * 3
    falls = sign == "-"
    start = first + slope if falls and style == "scan" else first - slope
    kind = "falling" if falls else "rising"
    return Function(kind, slope, min(max(start, 0), LARGEST)), sign, [slope] * 3


def trace(style: str, examples: tuple[int, ...]) -> tuple[str, str]:
    """(trajectory, attempt) of a solver of this style. The amounts on the way are the examples, right or wrong."""
    found, sign, steps = solve(examples, style)
    before = (found.start, *examples[:2])
    told = [f"{a} {sign} {d} = {b}" for a, d, b in zip(before, steps, examples, strict=True)]
    return f"{style} {' ; '.join(told)}", found.text


def quality(text: str, examples: tuple[int, ...]) -> float:
    """Share of the inputs at which the expression of an answer is right."""
    found, right = BY_TEXT.get(answer_block(text) or ""), BY_EXAMPLES[examples]
    return sum(found(x) == right(x) for x in INPUTS) / len(INPUTS) if found else 0.0
