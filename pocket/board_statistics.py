"""How far a mean over seeds and problems can be trusted, and which of many differences are no accident.

Every seed answers the same problems, so a table of scores (seeds, problems) varies by seed, by problem and by both
together: the crossed design with random effects and one observation a cell (Searle, Casella and McCulloch 1992, chapter
4). The variance of its mean is (M_s + M_p - M_e) / (seeds x problems), M the mean squares of seeds, problems and the
rest, with Satterthwaite's degrees of freedom. Where seeds differ no more than chance lets them, M_s < M_e, the problems
alone count, and so the other way round. A table of one seed has an interval over problems alone.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

LEVEL = 0.95


class Mean(NamedTuple):
    """A mean with the ends of its 95% interval, and the two-sided p-value of its being 0."""

    value: float
    low: float
    high: float
    p: float


def mean_of(scores: np.ndarray) -> Mean:
    """The mean of a table (seeds, problems) of scores, or of differences of scores."""
    value = float(scores.mean())
    variance, freedom = variance_of_mean(scores)
    if variance <= 1e-18:  # all alike: there is nothing to estimate it from
        return Mean(value, value, value, 1.0 if abs(value) < 1e-12 else 0.0)
    error = math.sqrt(variance)
    half = t_quantile(LEVEL, freedom) * error
    return Mean(value, value - half, value + half, t_tail(abs(value) / error, freedom))


def variance_of_mean(scores: np.ndarray) -> tuple[float, float]:
    """The variance of the mean of a table (seeds, problems), and its degrees of freedom."""
    seeds, problems = scores.shape
    if problems < 2:
        raise ValueError(f"an interval needs two problems, got a table of {seeds} seeds x {problems} problems")
    total = scores.mean()
    by_problem, by_seed = scores.mean(0) - total, scores.mean(1) - total
    of_problems = seeds * float((by_problem**2).sum()) / (problems - 1)
    if seeds == 1:
        return of_problems / problems, problems - 1
    of_seeds = problems * float((by_seed**2).sum()) / (seeds - 1)
    rest = scores - total - by_problem - by_seed[:, None]
    of_rest = float((rest**2).sum()) / ((seeds - 1) * (problems - 1))
    squares = [(of_seeds, seeds - 1), (of_problems, problems - 1)]
    counted = [(square, freedom) for square, freedom in squares if square > of_rest]
    if len(counted) == 2:
        counted.append((-of_rest, (seeds - 1) * (problems - 1)))
    counted = counted or [(of_rest, (seeds - 1) * (problems - 1))]
    both = sum(square for square, _ in counted)
    if both <= 0:
        return 0.0, 1.0
    freedom = both**2 / sum(square**2 / of for square, of in counted)
    return both / (seeds * problems), freedom


def t_tail(t: float, freedom: float) -> float:
    """P(|T| > t) of Student's distribution: with T = sqrt(freedom) tan(a), the integral of cos(a)^(freedom - 1)."""
    start = math.atan2(t, math.sqrt(freedom))
    places, weights = quadrature()
    # Most of it lies near the start: an even cut in the square root of the rest puts the points there.
    shares = (places + 1) / 2
    angles = start + (math.pi / 2 - start) * shares**2
    values = np.maximum(np.cos(angles), 0.0) ** (freedom - 1)
    part = float((weights * values * shares).sum()) * (math.pi / 2 - start)
    whole = math.sqrt(math.pi) / 2 * math.exp(math.lgamma(freedom / 2) - math.lgamma((freedom + 1) / 2))
    return min(1.0, part / whole)


@functools.cache
def quadrature() -> tuple[np.ndarray, np.ndarray]:
    """Points and weights of Gauss and Legendre on [-1, 1], which take longer than an integral by them."""
    return np.polynomial.legendre.leggauss(200)


def t_quantile(level: float, freedom: float) -> float:
    """The t that |T| exceeds with probability 1 - level, by bisection."""
    low, high = 0.0, 1.0
    while t_tail(high, freedom) > 1 - level:
        high *= 2
    for _ in range(60):
        middle = (low + high) / 2
        low, high = (middle, high) if t_tail(middle, freedom) > 1 - level else (low, middle)
    return high


def holm(p_values: Sequence[float]) -> list[float]:
    """Holm's adjusted p-values (1979): the smallest times their number, the next times one less, and so on, none below
    one before it. Whatever lies under 0.05 stands together with at most 5% chance of a single false one."""
    adjusted, largest = [1.0] * len(p_values), 0.0
    for rank, index in enumerate(sorted(range(len(p_values)), key=lambda i: p_values[i])):
        largest = max(largest, min(1.0, (len(p_values) - rank) * p_values[index]))
        adjusted[index] = largest
    return adjusted


class Correlation(NamedTuple):
    value: float
    p: float


def rank_correlation(a: np.ndarray, b: np.ndarray) -> Correlation | None:
    """Spearman's (1904) of (n,) values each, equals sharing their mean rank, and its two-sided p-value by Student's
    distribution; None where all of one are equal."""
    ranks = [(one[:, None] > one).sum(1) + (one[:, None] == one).sum(1) / 2 for one in (a, b)]
    if min(rank.std() for rank in ranks) == 0:
        return None
    value = float(np.corrcoef(*ranks)[0, 1])
    if 1 - value**2 < 1e-12:
        return Correlation(value, 0.0)
    freedom = len(a) - 2
    return Correlation(value, t_tail(abs(value) * math.sqrt(freedom / (1 - value**2)), freedom))


def percent(mean: Mean) -> str:
    """Of shares: "71.2 [68.0, 74.4]"."""
    low, high = max(0.0, mean.low), min(1.0, mean.high)
    return f"{100 * mean.value:.1f} [{100 * low:.1f}, {100 * high:.1f}]"


def points(mean: Mean) -> str:
    """Of differences of shares: "+3.1 [-0.2, +6.4]"."""
    return f"{100 * mean.value:+.1f} [{100 * mean.low:+.1f}, {100 * mean.high:+.1f}]"
