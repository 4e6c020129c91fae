"""The parts of PROTOCOL.md besides the board itself. They wait for its search, which decides what they compare."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import replace
from itertools import product
from statistics import fmean
from typing import Any

from studies.leaderboard.plan import FULL, SETUPS, Protocol, Run, Setup
from studies.leaderboard.variants import way

Results = Mapping[Run, Mapping[str, Any]]
FIRST = "d1"
WIDTH = 200  # of the large model, which has 2.1 million parameters
# One change each to the best row of the search, written as in the names of `variants.py`.
CHANGES = (
    "beta=0",
    "right_share=[1e-06,0.999999]",
    'advantage="trl"',
    "epsilon_high=0.5",
    "temperature=0.6",
    "segment_steps=4",
    "segment_steps=16",
    'segment_steps=null, num_views=8, draw_steps="entropy"',
    'estimator="elbo", segment_steps=null, num_views=4, antithetic=true, stratified=true',
    'sampler="cached+parallel", kv_cache="prefix", reveal_level=0.9',
)


def ranking(results: Results) -> list[str]:
    """The methods, best first: by the mean over setups of what the search's choice solves of the validation problems.

    Raises:
        ValueError: the search is not complete.
    """
    solved: dict[str, list[float]] = {}
    for setup, method in product(FULL.setups, FULL.methods):
        runs, choice = FULL.tuning(results, setup, method)
        if choice is None:
            raise ValueError(f"the board's search is not complete: {method}, {setup.label} needs {len(runs)} more runs")
        solved.setdefault(method, []).append(choice.accuracy)
    return sorted(solved, key=lambda method: -fmean(solved[method]))


def every_seed(methods: Iterable[str], setup: Setup) -> Protocol:
    """All methods with all seeds, at the smaller budget."""
    return replace(FULL, methods=(*methods,), setups=(setup,), budgets=FULL.budgets[:1], most=99, far=1.0)


def best_way(results: Results) -> Protocol:
    """From d1 to the best other method: one idea at a time, and one after the other."""
    best = next(method for method in ranking(results) if method != FIRST)
    return every_seed((FIRST, *way(FIRST, best), best), SETUPS["sudoku-sft"])


def scale(results: Results) -> Protocol:
    """d1 and the five best others, on a model with ten times as many parameters."""
    best = [method for method in ranking(results) if method != FIRST]
    return every_seed((FIRST, *best[:5]), Setup("large-sudoku", "sft"))


def candidate_search(results: Results) -> Protocol:
    """The best row with one change each: the search alone, on validation problems."""
    best = ranking(results)[0]
    names = (best, *(f"{best}, {change}" for change in CHANGES))
    return replace(FULL, methods=names, setups=(SETUPS["sudoku-sft"], SETUPS["arithmetic-sft"]), seeds=0)


PARTS: dict[str, Callable[[Results], Protocol]] = {
    "board": lambda results: FULL,
    "way": best_way,
    "scale": scale,
    "candidates": candidate_search,
}
