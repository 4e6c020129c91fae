"""Multi-step arithmetic, a GSM8K of pocket size: word problems of three steps, and one number for an answer.

"Ann has 27 apples. She finds 8. She doubles them. She loses 5. How many apples?" Every amount on the way has two
digits. Files have GSM8K's columns; rewards, metric and the reading of answers are GSM8K's.
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
LEAST, MOST = 10, 99  # amounts on the way


class Step(NamedTuple):
    """`sign` is "+", "-" or "*"; `operand` is 2 to 9, of "*" 2 or 3."""

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
    """What a step makes of an amount."""
    signed = {"+": step.operand, "-": -step.operand}
    return amount * step.operand if step.sign == "*" else amount + signed[step.sign]


def draw_problem(start: int, operands: Sequence[int], rng: Generator) -> Problem:
    """A problem with these numbers: the operands in any order, each with any sign that keeps to two digits ("*" twice
    as likely as the others, since few amounts can be doubled)."""
    amount, steps = start, []
    for index in rng.permutation(len(operands)):
        choices = [Step(sign, operands[index]) for sign in ("+-**" if operands[index] in TIMES else "+-")]
        choices = [step for step in choices if LEAST <= after(amount, step) <= MOST]
        steps.append(choices[rng.integers(len(choices))])
        amount = after(amount, steps[-1])
    return Problem(question_of(start, steps, rng), start, tuple(steps))


def question_of(start: int, steps: Sequence[Step], rng: Generator) -> str:
    """The problem in words; who, what and the verbs are drawn."""
    person = list(PEOPLE)[rng.integers(len(PEOPLE))]
    things = THINGS[rng.integers(len(THINGS))]
    told = [TIMES[k] + " them" if sign == "*" else f"{VERBS[sign][rng.integers(3)]} {k}" for sign, k in steps]
    sentences = [f"{person} has {start} {things}.", *(f"{PEOPLE[person]} {text}." for text in told)]
    return " ".join([*sentences, f"How many {things}?"])
