"""The parts of PROTOCOL.md besides the board itself. They wait for its search, which decides what they compare."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from contextlib import suppress
from dataclasses import replace
from statistics import fmean
from typing import Any

from studies.leaderboard.plan import CANDIDATES, FULL, REFERENCE, SETUPS, Protocol, Run, Setup
from studies.leaderboard.variants import REINFORCE, TRACERL, way

Results = Mapping[Run, Mapping[str, Any]]
WIDTH = 200  # of the large model, which has 2.1 million parameters
# One change each to the best row of the search, rldf, written as in the names of `variants.py`.
CHANGES = (
    "beta=0",
    "right_share=[0.2,0.8]",
    "num_iterations=4, split_views=true",
    "num_iterations=8, split_views=true",
    "num_views=2",
    "num_views=8",
    "temperature=0.8",
    "reveal_level=0.8",
    'sampler="cached+parallel", kv_cache="prefix"',
    TRACERL,
    REINFORCE,
)
# One change each to the best row of the first two rounds, which is the row with `TRACERL`. The last one scores every
# merged step, as tracerl does: with the row's own num_views, four of them are drawn.
LAST_CHANGES = ("temperature=0.8", "reveal_level=0.95", "segment_steps=4", "num_iterations=8", "num_views=null")
SEARCHED = ("sudoku-sft", "countdown-sft", "arithmetic-sft")  # setups of the search of a candidate


def ranking(results: Results, setups: Iterable[Setup] = FULL.setups, candidates: bool = True) -> list[str]:
    """The methods, best first: by the mean over `setups` of what the search's choice solves of the validation problems.

    Raises:
        ValueError: the search is not complete.
    """
    methods = [method for method in FULL.methods if candidates or method not in CANDIDATES]
    solved = solved_by(results, methods, tuple(setups))
    return sorted(solved, key=lambda method: -solved[method])


def searched(results: Results, method: str, setups: Iterable[Setup]) -> float:
    """The mean over setups of what the search's choice solves of the validation problems.

    Raises:
        ValueError: the search of the method is not complete.
    """
    found = []
    for setup in setups:
        runs, choice = FULL.tuning(results, setup, method)
        if choice is None:
            raise ValueError(f"the board's search is not complete: {method}, {setup.label} needs {len(runs)} more runs")
        found.append(choice.accuracy)
    return fmean(found)


def every_seed(methods: Iterable[str], setup: Setup, seeds: int = FULL.seeds) -> Protocol:
    """All methods with the same seeds, at the smaller budget."""
    return replace(FULL, methods=(*methods,), setups=(setup,), budgets=FULL.budgets[:1], seeds=seeds, most=99, far=1.0)


def best_way(results: Results) -> Protocol:
    """From d1 to the best other method: one idea at a time, and one after the other."""
    best = next(method for method in ranking(results) if method != REFERENCE)
    return every_seed((REFERENCE, *way(REFERENCE, best), best), SETUPS["sudoku-sft"])


def scale(results: Results) -> Protocol:
    """d1 and the five best others of the same task, on a model with ten times as many parameters."""
    best = [method for method in ranking(results, [SETUPS["sudoku-sft"]]) if method != REFERENCE]
    return every_seed((REFERENCE, *best[:5]), Setup("large-sudoku", "sft"), seeds=4)


def candidate_search(results: Results) -> Protocol:
    """The best row with one change each, then with several, then the best of these with one more: the search alone, on
    validation problems."""
    best = ranking(results, candidates=False)[0]
    setups = tuple(SETUPS[label] for label in SEARCHED)
    names = [best, *(f"{best}, {change}" for change in CHANGES)]
    with suppress(ValueError):  # as long as a round is not complete
        names += combined(solved_by(results, names, setups))
        solved = solved_by(results, names, setups)
        names += [f"{max(names, key=solved.__getitem__)}, {change}" for change in LAST_CHANGES]
    return replace(FULL, methods=(*names,), setups=setups, seeds=0)


def solved_by(results: Results, names: Iterable[str], setups: tuple[Setup, ...]) -> dict[str, float]:
    """Name -> the mean over setups of what the search's choice solves; ValueError if a search is not complete."""
    return {name: searched(results, name, setups) for name in names}


def combined(solved: Mapping[str, float]) -> tuple[str, ...]:
    """The row with all changes that are better than the row itself, with the best three and with the best two.

    Of the changes of the same setting, only the best one counts.

    Args:
        solved: name -> the mean accuracy of the search; the row itself comes first.
    """
    row, *changed = solved
    kept: list[str] = []
    for name in sorted(changed, key=lambda one: -solved[one]):
        if solved[name] > solved[row] and not any(settings_of(name) & settings_of(other) for other in kept):
            kept.append(name)
    changes = [name.removeprefix(f"{row}, ") for name in kept]
    return tuple(dict.fromkeys(", ".join([row, *changes[:most]]) for most in (99, 3, 2) if len(changes) > 1))


def settings_of(name: str) -> set[str]:
    """The settings that a row with changes has otherwise."""
    return {change.partition("=")[0] for change in name.split(", ")[1:]}


def short(method: str) -> str:
    """A method's name in a table. A candidate has a star; the updates of another row are named after that row."""
    for changes, name in ((TRACERL, "tracerl's updates"), (REINFORCE, "reinforce's updates")):
        method = method.replace(changes, name)
    return method + "*" * (method in CANDIDATES)


PARTS: dict[str, Callable[[Results], Protocol]] = {
    "board": lambda results: FULL,
    "way": best_way,
    "scale": scale,
    "candidates": candidate_search,
}
