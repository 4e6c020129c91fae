"""Significance of many differences, and the variation between seeds, estimated from many methods together.

Three seeds say little about the variation between seeds. For a table that is the difference of two methods, M_s of
`pocket/uncertainty.py` can be estimated from all methods together: it is twice the mean square of the interaction of
methods and seeds, which has many more degrees of freedom. This assumes that seeds vary equally for all methods, on
average.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple

import numpy as np
from scipy.stats import spearmanr

from pocket.uncertainty import Mean, Square


class Interval(NamedTuple):
    """A share, or a difference of shares, with its 95% percentile interval."""

    value: float
    low: float
    high: float


def table(scores: Mapping[int, np.ndarray]) -> np.ndarray:
    """(seeds, problems), by seed."""
    return np.stack([scores[seed] for seed in sorted(scores)])


def pooled_seeds(methods: Sequence[Mapping[int, np.ndarray]]) -> Square | None:
    """M_s of a difference of two of these methods (seed -> scores of problems), estimated from all of them and the
    seeds that they share; None for fewer than two. For two methods, it is the M_s of their difference."""
    shared = sorted(set.intersection(*(set(scores) for scores in methods))) if methods else []
    if len(methods) < 2 or len(shared) < 2:
        return None
    means = np.array([[scores[seed].mean() for seed in shared] for scores in methods])
    rest = means - means.mean(0) - means.mean(1, keepdims=True) + means.mean()
    freedom = (len(methods) - 1) * (len(shared) - 1)
    return Square(2 * len(methods[0][shared[0]]) * float((rest**2).sum()) / freedom, freedom)


def holm(p_values: Sequence[float]) -> list[float]:
    """Holm's adjusted p-values (1979): the smallest times their number, the next times one less, and so on, each at
    least as large as the one before. The probability that any value below 0.05 is a false discovery is at most 5%.
    SciPy's `false_discovery_control` controls the rate of false discoveries, which is a weaker claim."""
    adjusted, largest = [1.0] * len(p_values), 0.0
    for rank, index in enumerate(sorted(range(len(p_values)), key=lambda i: p_values[i])):
        largest = max(largest, min(1.0, (len(p_values) - rank) * p_values[index]))
        adjusted[index] = largest
    return adjusted


class Correlation(NamedTuple):
    value: float
    p: float


def rank_correlation(a: np.ndarray, b: np.ndarray) -> Correlation | None:
    """Spearman's rank correlation of two arrays (n,), with its two-sided p-value by Student's distribution; None if all
    values of one array are equal."""
    if min(np.ptp(a), np.ptp(b)) == 0:
        return None
    value, p = map(float, spearmanr(a, b))
    return Correlation(value, p if 1 - value**2 > 1e-12 else 0.0)  # otherwise p would be rounding noise


def correlation(a: Mapping[str, float], b: Mapping[str, float], fewest: int = 5) -> str:
    """The rank correlation over the methods that both have, with its p-value; "" for fewer than `fewest` methods."""
    shared = [method for method in a if method in b]
    if len(shared) < fewest:
        return ""
    found = rank_correlation(np.array([a[one] for one in shared]), np.array([b[one] for one in shared]))
    return "" if found is None else f"{found.value:+.2f} (p {found.p:.2g})"


def percent(mean: Mean | Interval) -> str:
    """A mean of shares in percent: "71.2 [68.0, 74.4]"."""
    low, high = max(0.0, mean.low), min(1.0, mean.high)
    return f"{100 * mean.value:.1f} [{100 * low:.1f}, {100 * high:.1f}]"


def points(mean: Mean | Interval) -> str:
    """A mean of differences of shares in points: "+3.1 [-0.2, +6.4]"."""
    return f"{100 * mean.value:+.1f} [{100 * mean.low:+.1f}, {100 * mean.high:+.1f}]"
