"""Training texts of the Countdown base model: problems on the training sets of numbers, and traces of three solvers.

A trace has two steps ("careful 7 * 5 = 35 ; 35 + 2 = 37"); the attempt is the expression ("( 7 * 5 ) + 2"). `careful`
takes the simplest right way: a small model that learnt all right ways would mix the first half of one with the second
half of another. `scan` uses only + and - and comes as near to the target as these allow; `quick` adds all three
numbers.
"""

from __future__ import annotations

from functools import lru_cache
from pathlib import Path

from d1.tasks import load_task
from d1.tasks.countdown import evaluate
from d1.tasks.pocket_countdown import SIGNS, Chain, chains, extract
from pocket.answers import Draw

Numbers = tuple[int, int, int]
HUMS = 10  # number of "hmm"s that a rambling answer has room for
chains_of = lru_cache(maxsize=None)(chains)


def problems(data_file: str | Path) -> Draw:
    """Draws (numbers, target) from the problems of a file."""
    truths = load_task("pocket_countdown").load_rows("train", str(data_file))["ground_truth"]
    known = [(tuple(numbers), target) for numbers, target in truths]
    return lambda count, rng: [known[i] for i in rng.integers(len(known), size=count)]


def question(numbers: Numbers, target: int) -> str:
    """The problem as the task asks it."""
    return f"Numbers: {list(numbers)}\nTarget: {target}"


def plainness(chain: Chain) -> tuple[object, ...]:
    """The sort key of ways: their signs, sums before products, then their numbers."""
    return SIGNS.index(chain.first), SIGNS.index(chain.second), chain


def solve(numbers: Numbers, target: int, style: str) -> Chain:
    """The steps that a solver of this style takes."""
    every = chains_of(numbers)
    if style == "careful":
        return min((chain for chain in every if chain.value == target), key=plainness)
    signs = {"+"} if style == "quick" else {"+", "-"}
    allowed = [chain for chain in every if {chain.first, chain.second} <= signs]
    return min(allowed, key=lambda chain: (abs(chain.value - target), chain.c, chain))


def trace(style: str, numbers: Numbers, target: int) -> tuple[str, str]:
    """(trajectory, attempt) of a solver of this style."""
    a, first, b, middle, second, c, value = solve(numbers, target, style)
    return f"{style} {a} {first} {b} = {middle} ; {middle} {second} {c} = {value}", f"( {a} {first} {b} ) {second} {c}"


def quality(text: str, numbers: Numbers, target: int) -> float:
    """1 for a right expression, less 0.1 for each unit between its value and the target."""
    value = evaluate(extract(text) or "", numbers)
    return 0.0 if value is None else max(0.0, 1.0 - float(abs(value - target)) / 10)
