"""Multi-step arithmetic, a GSM8K of pocket size: word problems of three steps, with one number as the answer.

"Ann has 27 apples. She finds 8. She doubles them. She loses 5. How many apples?" Every amount, also after each step,
has two digits. The columns of files, the rewards, the metric and the extraction of answers are those of GSM8K.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, NamedTuple

from datasets import Dataset

from d1.tasks import gsm8k
from d1.tasks.data import file_of
from d1.tasks.gsm8k import REWARDS, demonstrate, extract, score

if TYPE_CHECKING:
    from numpy.random import Generator

__all__ = ["REWARDS", "Problem", "Step", "demonstrate", "draw_problem", "extract", "load_rows", "question_of", "score"]

PEOPLE = {"Ann": "She", "Eva": "She", "Mia": "She", "Ben": "He", "Leo": "He", "Tom": "He"}
THINGS = ("apples", "books", "cards", "coins", "pens", "shells")
VERBS = {"+": ("finds", "buys", "gets"), "-": ("loses", "sells", "drops")}
TIMES = {2: "doubles", 3: "triples"}
MIN_AMOUNT, MAX_AMOUNT = 10, 99  # range of the amounts


class Step(NamedTuple):
    """`sign` is "+", "-" or "*"; `operand` is 2 to 9, for "*" 2 or 3."""

    sign: str
    operand: int


class Problem(NamedTuple):
    question: str
    start: int
    steps: tuple[Step, ...]


def load_rows(split: str, data_file: str | None = None) -> Dataset:
    """Problems of `dataset/arithmetic_{split}.jsonl`, whose splits share no set of numbers, or of `data_file`."""
    return gsm8k.load_rows(split, file_of(split, data_file, "arithmetic_{}.jsonl"))


def after(amount: int, step: Step) -> int:
    """The amount after a step."""
    if step.sign == "*":
        return amount * step.operand
    if step.sign == "+":
        return amount + step.operand
    return amount - step.operand


def draw_problem(start: int, operands: Sequence[int], rng: Generator) -> Problem:
    """A problem with these numbers: the operands in random order, each with a random sign that keeps the amount at two
    digits ("*" is twice as likely as the others, because few amounts can be doubled)."""
    amount = start
    steps: list[Step] = []
    for index in rng.permutation(len(operands)):
        signs = "+-**" if operands[index] in TIMES else "+-"
        choices = []
        for sign in signs:
            step = Step(sign, operands[index])
            if MIN_AMOUNT <= after(amount, step) <= MAX_AMOUNT:
                choices.append(step)
        step = choices[rng.integers(len(choices))]
        steps.append(step)
        amount = after(amount, step)
    return Problem(question_of(start, steps, rng), start, tuple(steps))


def question_of(start: int, steps: Sequence[Step], rng: Generator) -> str:
    """The problem in words; the person, the things and the verbs are drawn at random."""
    person = list(PEOPLE)[rng.integers(len(PEOPLE))]
    things = THINGS[rng.integers(len(THINGS))]
    sentences = [f"{person} has {start} {things}."]
    for sign, operand in steps:
        if sign == "*":
            clause = f"{TIMES[operand]} them"
        else:
            verb = VERBS[sign][rng.integers(3)]
            clause = f"{verb} {operand}"
        sentences.append(f"{PEOPLE[person]} {clause}.")
    sentences.append(f"How many {things}?")
    return " ".join(sentences)
