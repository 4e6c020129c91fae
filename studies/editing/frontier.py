"""How far settings with edits lie above the unedited frontier."""

from __future__ import annotations

import statistics
from typing import Any


def outcomes(runs: list[dict[str, Any]]) -> list[float]:
    """The share of seeds that solve each problem."""
    return [statistics.fmean(map(int, column)) for column in zip(*(run["solved"] for run in runs), strict=True)]


def gains(runs: list[dict[str, Any]], unedited: list[list[dict[str, Any]]]) -> list[float]:
    """Per problem, what runs solve more than the best unedited setting of any model that takes no more passes; empty if
    none is as fast."""
    passes = statistics.fmean(run["passes"] for run in runs)
    cheaper = [other for other in unedited if statistics.fmean(run["passes"] for run in other) <= passes]
    if not cheaper:
        return []
    best = outcomes(max(cheaper, key=lambda other: statistics.fmean(outcomes(other))))
    return [a - b for a, b in zip(outcomes(runs), best, strict=True)]
