"""Accuracy against tokens per pass: points, and the area under them."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from statistics import fmean
from typing import Any

import numpy as np

PENALTY, ALLOWED = 3.0, 5.0  # AUP's alpha, and points of accuracy below the slowest point


def accuracy(found: Mapping[str, Any]) -> float:
    """In percent, of one sampler's outcomes."""
    return 100 * found["solved"].count("1") / len(found["solved"])


def mean_over(found: Iterable[Mapping[str, Any]], value: str) -> float:
    """The mean over what one sampler did with several seeds: of its accuracy in percent, or of a count per problem
    (passes, tokens, computed tokens, seconds)."""
    return fmean(accuracy(one) if value == "accuracy" else one[value] for one in found)


def outcomes(found: Iterable[Mapping[str, Any]]) -> np.ndarray:
    """(seeds, problems), 1 where a problem is solved."""
    return np.array([[*map(int, one["solved"])] for one in found], dtype=float)


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
