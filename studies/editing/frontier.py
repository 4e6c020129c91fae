"""How far settings with edits lie above the unedited frontier."""

from __future__ import annotations

import statistics
from typing import Any

import numpy as np

from studies.samplers.points import outcomes

Runs = dict[int, dict[str, Any]]  # seed -> what one sampler did with one model


def passes(runs: Runs) -> float:
    return statistics.fmean(run["passes"] for run in runs.values())


def gains(runs: Runs, unedited: list[Runs]) -> np.ndarray:
    """(seeds, problems), what runs solve more than the best unedited setting of any model that takes no more passes;
    empty if none is as fast. Only seeds that both have count."""
    cheaper = [other for other in unedited if passes(other) <= passes(runs) and runs.keys() & other.keys()]
    if not cheaper:
        return np.zeros((0, 0))
    best = max(cheaper, key=lambda other: outcomes(other.values()).mean())
    seeds = [seed for seed in runs if seed in best]
    return outcomes(runs[seed] for seed in seeds) - outcomes(best[seed] for seed in seeds)
