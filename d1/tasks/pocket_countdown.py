"""Countdown at pocket size: three numbers from 1 to 20, and a target up to 60 that they reach with + - * in two steps.

Rewards and metric are those of Countdown, so any correct expression counts, also with other steps or with division.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from datasets import Dataset

from d1.tasks import countdown
from d1.tasks.countdown import REWARDS, extract, score
from d1.tasks.data import file_of

__all__ = ["REWARDS", "Chain", "chains", "extract", "load_rows", "score"]

LARGEST_NUMBER = 20  # of the three given numbers
SIGNS = "+-*"  # without division: a sixth of the problems would have it, and a model of this size did not learn it
LARGEST = 60  # of the targets and of the results of steps


class Chain(NamedTuple):
    """Two steps: `a first b = middle`, then `middle second c = value`."""

    a: int
    first: str
    b: int
    middle: int
    second: str
    c: int
    value: int


def load_rows(split: str, data_file: str | None = None) -> Dataset:
    """Problems of `dataset/pocket_countdown_{split}.jsonl`, whose splits share no set of numbers, or of `data_file`."""
    return countdown.load_rows(split, file_of(split, data_file, "pocket_countdown_{}.jsonl"))


def apply(a: int, sign: str, b: int) -> int | None:
    """`a sign b` if that is a whole number from 0 to `LARGEST`, else None."""
    if sign == "+":
        value = a + b
    elif sign == "-":
        value = a - b
    else:
        value = a * b
    return value if 0 <= value <= LARGEST else None


def chains(numbers: Sequence[int]) -> list[Chain]:
    """All ways to use three numbers once each, in two steps; the larger of the first two comes first. Sorted."""
    values = set()
    for last in range(3):
        low, high = sorted(n for i, n in enumerate(numbers) if i != last)
        for first in SIGNS:
            middle = apply(high, first, low)
            if middle is None:
                continue
            for second in SIGNS:
                value = apply(middle, second, numbers[last])
                if value is not None:
                    values.add(Chain(high, first, low, middle, second, numbers[last], value))
    return sorted(values)
