"""Accuracy against tokens per pass: points, and the area under them."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from statistics import fmean
from typing import Any

PENALTY, ALLOWED = 3.0, 5.0  # AUP's alpha, and points of accuracy below the slowest point


def accuracy(found: Mapping[str, Any]) -> float:
    """In percent, of one sampler's outcomes."""
    return 100 * found["solved"].count("1") / len(found["solved"])


def points(samplers: Mapping[str, Any]) -> list[tuple[float, float]]:
    """(tokens per pass, accuracy in percent) of each sampler."""
    return [(found["tokens"] / found["passes"], accuracy(found)) for found in samplers.values()]


def area(pairs: Sequence[tuple[float, float]], highest: float) -> float:
    """AUP (arXiv 2601.07568) of (tokens per pass, accuracy in percent); `highest` is the best accuracy of the task."""
    pairs = sorted(pairs)
    pairs = [pair for pair in pairs if pair[1] >= pairs[0][1] - ALLOWED]
    weighed = [y * min(math.exp(-PENALTY * (1 - y / highest)), 1.0) for _, y in pairs]
    total = pairs[0][0] * pairs[0][1]
    for i in range(1, len(pairs)):
        total += (pairs[i][0] - pairs[i - 1][0]) * (weighed[i] + weighed[i - 1]) / 2
    return total


def aup(samplers: Mapping[str, Any], highest: float | None = None) -> float:
    """AUP of a model over its samplers; `highest` None: its own best accuracy."""
    found = points(samplers)
    return area(found, max(y for _, y in found) if highest is None else highest)


def best_rate(lines: Sequence[Mapping[str, Any]], rates: Mapping[str, Sequence[float]]) -> dict[str, float]:
    """method -> of its learning rates the one with the highest AUP; only for methods whose `rates` were all tried."""
    best = {}
    for method, tried in rates.items():
        own = {line["rate"]: line["samplers"] for line in lines if line["method"] == method}
        if {*own} == {*tried}:
            highest = max(y for samplers in own.values() for _, y in points(samplers))
            best[method] = max(own, key=lambda rate: aup(own[rate], highest))
    return best


def mean_over(lines: Sequence[Mapping[str, Any]], split: str, name: str, value: str) -> float:
    """A sampler's accuracy, or its passes, tokens or computed tokens per problem: the mean of the seeds."""
    found = [line[split][name] for line in lines]
    return fmean(accuracy(one) if value == "accuracy" else one[value] for one in found)


def chosen(lines: Sequence[Mapping[str, Any]], least: float) -> str:
    """The sampler with the fewest passes among those that solve `least` percent of the validation problems in the mean
    of these lines (the seeds of one model); if there is none, the most accurate one."""
    names = [*lines[0]["validation"]]
    good = [name for name in names if mean_over(lines, "validation", name, "accuracy") >= least]
    if good:
        return min(good, key=lambda name: mean_over(lines, "validation", name, "passes"))
    return max(names, key=lambda name: mean_over(lines, "validation", name, "accuracy"))
