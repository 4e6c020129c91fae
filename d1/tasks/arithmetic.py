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
LEAST, MOST = 10, 99  # range of the amounts


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
    signed = {"+": step.operand, "-": -step.operand}
    return amount * step.operand if step.sign == "*" else amount + signed[step.sign]


def draw_problem(start: int, operands: Sequence[int], rng: Generator) -> Problem:
    """A problem with these numbers: the operands in random order, each with a random sign that keeps the amount at two
    digits ("*" is twice as likely as the others, because few amounts can be doubled)."""
    amount, steps = start, []
    for index in rng.permutation(len(operands)):
        choices = [Step(sign, operands[index]) for sign in ("+-**" if operands[index] in TIMES else "+-")]
        choices = [step for step in choices if LEAST <= after(amount, step) <= MOST]
        steps.append(choices[rng.integers(len(choices))])
        amount = after(amount, steps[-1])
    return Problem(question_of(start, steps, rng), start, tuple(steps))


def question_of(start: int, steps: Sequence[Step], rng: Generator) -> str:
    """The problem in words; the person, the things and the verbs are drawn at random."""
    person = list(PEOPLE)[rng.integers(len(PEOPLE))]
    things = THINGS[rng.integers(len(THINGS))]
    clauses = [TIMES[k] + " them" if sign == "*" else f"{VERBS[sign][rng.integers(3)]} {k}" for sign, k in steps]
    sentences = [f"{person} has {start} {things}.", *(f"{PEOPLE[person]} {text}." for text in clauses)]
    return " ".join([*sentences, f"How many {things}?"])
