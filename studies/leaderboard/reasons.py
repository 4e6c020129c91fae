"""What explains the leaderboard: d1 with one of its choices changed at a time, and what goes with a high place."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from statistics import fmean

import numpy as np

from d1.show.tables import markdown_table
from pocket.uncertainty import mean_of
from studies.leaderboard.plan import CHANGED, Run
from studies.leaderboard.results import Line, Setup, gains, lines_of, methods_of, scores_at, table
from studies.leaderboard.statistics import holm, percent, points, rank_correlation

FEWEST = 5  # methods that a correlation over them is given for
QUANTITIES: dict[str, Callable[[Line], float | None]] = {
    "rate": lambda line: line["run"]["learning_rate"],
    "rollouts": lambda line: line["rollouts"],
    "updates": lambda line: line["updates"],
    "KL": lambda line: line["kl"],
}


def changes_table(results: Mapping[Run, Line], changes: Mapping[Run, Line]) -> str:
    """One row a change: d1's accuracy with it, less d1's, by task, paired by seed and problem; Holm's p over all."""
    setups = [*dict.fromkeys(Setup(run.task, run.start) for run in changes)]
    names = [*dict.fromkeys(run.change for run in changes)]
    ends, gained = {}, {}
    for setup in setups:
        unchanged = scores_at(results, setup, CHANGED, "end")
        by_name = {
            name: scores_at({run: line for run, line in changes.items() if run.change == name}, setup, CHANGED, "end")
            for name in names
        }
        for name, gain in gains(unchanged, {name: scores for name, scores in by_name.items() if scores}).items():
            ends[name, setup], gained[name, setup] = mean_of(table(by_name[name])), gain
    corrected = dict(zip(gained, holm([mean.p for mean in gained.values()]), strict=True))
    rows = []
    for change in dict.fromkeys(change for change, _ in gained):
        row = [change]
        for setup in setups:
            key = (change, setup)
            row += [percent(ends[key]), points(gained[key]), f"{corrected[key]:.2g}"] if key in gained else [""] * 3
        rows.append(row)
    header = [part for setup in setups for part in (f"{setup.task}, at the end", f"less {CHANGED}'s", "Holm's p")]
    return markdown_table([f"{CHANGED} with", *header], rows)


def ends_of(results: Mapping[Run, Line], setup: Setup) -> dict[str, float]:
    """Method -> its mean accuracy at the end."""
    return {one: table(scores_at(results, setup, one, "end")).mean() for one in methods_of(results, setup)}


def correlations_table(results: Mapping[Run, Line], setups: Sequence[Setup]) -> str:
    """One row a setup: Spearman's rank correlation, over methods, of the accuracy at the end with what a run spent and
    how far it went, and with the accuracy in the other setups."""
    ends = {setup: ends_of(results, setup) for setup in setups}
    rows = []
    for setup, own in ends.items():
        row = [setup.label]
        row += [correlation(own, quantities_of(results, setup, of)) for of in QUANTITIES.values()]
        row += [correlation(own, other) if other is not own else "" for other in ends.values()]
        rows.append(row)
    return markdown_table(["accuracy, with", *QUANTITIES, *(setup.label for setup in setups)], rows)


def quantities_of(results: Mapping[Run, Line], setup: Setup, of: Callable[[Line], float | None]) -> dict[str, float]:
    """Method -> the mean over its runs, of those that have a value."""
    found: dict[str, float] = {}
    for method in methods_of(results, setup):
        values = [value for line in lines_of(results, setup, method) if (value := of(line)) is not None]
        found |= {method: fmean(values)} if values else {}
    return found


def correlation(a: Mapping[str, float], b: Mapping[str, float]) -> str:
    """Over the methods that both have; with its p-value."""
    shared = [method for method in a if method in b]
    if len(shared) < FEWEST:
        return ""
    found = rank_correlation(np.array([a[one] for one in shared]), np.array([b[one] for one in shared]))
    return "" if found is None else f"{found.value:+.2f} (p {found.p:.2g})"
