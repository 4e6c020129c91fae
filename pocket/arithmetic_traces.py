"""Training texts of the arithmetic base model: word problems on the training numbers, and traces of three solvers.

A trace has three steps ("careful 27 + 8 = 35 ; 35 * 2 = 70 ; 70 - 5 = 65"); the attempt is the last amount. `careful`
is right. `scan` never borrows in a difference; `quick` neither borrows nor carries.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import Path

from numpy.random import Generator

from d1.tasks import load_task
from d1.tasks.arithmetic import MAX_AMOUNT, MIN_AMOUNT, TIMES, Problem, Step, after, draw_problem
from pocket.answers import Draw

HUMS = 9  # number of "hmm"s that a rambling answer has room for


def training_numbers(data_file: str | Path) -> list[tuple[int, ...]]:
    """The start and the operands of each problem of a file."""
    words = {word: str(factor) for factor, word in TIMES.items()}
    questions = load_task("arithmetic").load_rows("train", str(data_file))["question"]
    return [
        tuple(int(words.get(found, found)) for found in re.findall(rf"\d+|{'|'.join(words)}", text))
        for text in questions
    ]


def problems(data_file: str | Path, steps: int | None = None) -> Draw:
    """Draws word problems on the numbers of a file, with the first `steps` operands (None: all)."""
    numbers = training_numbers(data_file)

    def draw(count: int, rng: Generator) -> list[Problem]:
        drawn = (numbers[i] for i in rng.integers(len(numbers), size=count))
        return [draw_problem(start, operands[:steps], rng) for start, *operands in drawn]

    return draw


def question(text: str, *_: object) -> str:
    return text


def come_to(amount: int, step: Step, style: str) -> int:
    """The amount after a step, as a solver of this style computes it; kept to two digits, like all amounts."""
    ones = after(amount % 10, step)
    slips = style == "quick" or (style == "scan" and step.sign == "-")
    if not slips or 0 <= ones <= 9:
        return min(max(after(amount, step), MIN_AMOUNT), MAX_AMOUNT)
    tens = amount // 10 * step.operand if step.sign == "*" else amount // 10
    return 10 * min(tens, 9) + ones % 10


def trace(style: str, _: str, start: int, steps: Sequence[Step]) -> tuple[str, str]:
    """(trajectory, attempt) of a solver of this style."""
    amount, told = start, []
    for step in steps:
        before, amount = amount, come_to(amount, step, style)
        told.append(f"{before} {step.sign} {step.operand} = {amount}")
    return f"{style} {' ; '.join(told)}", str(amount)


def quality(text: str, _: str, start: int, steps: Sequence[Step]) -> float:
    """Share of the steps that are right."""
    right, _ = trace("careful", "", start, steps)
    told = text.partition("</reasoning>")[0].partition(" ")[2].split(" ; ")
    return sum(a == b for a, b in zip(told, right.partition(" ")[2].split(" ; "), strict=False)) / len(steps)
