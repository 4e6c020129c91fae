"""How far a mean over seeds and problems can be trusted, and which of many differences are no accident.

Every seed answers the same problems, so a table of scores (seeds, problems) varies by seed, by problem and by both
together: the crossed design with random effects and one observation a cell (Searle, Casella and McCulloch 1992, chapter
4). The variance of its mean is (M_s + M_p - M_e) / (seeds x problems), M the mean squares of seeds, problems and the
rest, with Satterthwaite's degrees of freedom. Where seeds differ no more than chance lets them, M_s < M_e, the problems
alone count, and so the other way round. A table of one seed has an interval over problems alone.

Three seeds say little about how far seeds vary. Where a table is the difference of two methods, M_s can be that of all
methods together: twice the mean square of the interaction of methods and seeds, which has many more degrees of freedom.
It takes seeds to vary alike for all methods, on average.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Mapping, Sequence
from typing import NamedTuple

import numpy as np

LEVEL = 0.95


class Mean(NamedTuple):
    """A mean with the ends of its 95% interval, and the two-sided p-value of its being 0."""

    value: float
    low: float
    high: float
    p: float


class Square(NamedTuple):
    """A mean square and its degrees of freedom."""

    value: float
    freedom: float


def mean_of(scores: np.ndarray, of_seeds: Square | None = None) -> Mean:
    """The mean of a table (seeds, problems) of scores, or of differences of scores; `of_seeds` in place of its own."""
    value = float(scores.mean())
    variance, freedom = variance_of_mean(scores, of_seeds)
    if variance <= 1e-18:  # all alike: there is nothing to estimate it from
        return Mean(value, value, value, 1.0 if abs(value) < 1e-12 else 0.0)
    error = math.sqrt(variance)
    half = t_quantile(LEVEL, freedom) * error
    return Mean(value, value - half, value + half, t_tail(abs(value) / error, freedom))


def variance_of_mean(scores: np.ndarray, of_seeds: Square | None = None) -> tuple[float, float]:
    """The variance of the mean of a table (seeds, problems), and its degrees of freedom."""
    seeds, problems = scores.shape
    if problems < 2:
        raise ValueError(f"an interval needs two problems, got a table of {seeds} seeds x {problems} problems")
    total = scores.mean()
    by_problem, by_seed = scores.mean(0) - total, scores.mean(1) - total
    of_problems = Square(seeds * float((by_problem**2).sum()) / (problems - 1), problems - 1)
    if seeds == 1:
        return of_problems.value / problems, of_problems.freedom
    own = Square(problems * float((by_seed**2).sum()) / (seeds - 1), seeds - 1)
    rest = scores - total - by_problem - by_seed[:, None]
    freedom = (seeds - 1) * (problems - 1)
    of_rest = Square(float((rest**2).sum()) / freedom, freedom)
    counted = [square for square in (of_seeds or own, of_problems) if square.value > of_rest.value]
    if len(counted) == 2:
        counted.append(Square(-of_rest.value, freedom))
    counted = counted or [of_rest]
    both = sum(square.value for square in counted)
    if both <= 0:
        return 0.0, 1.0
    return both / (seeds * problems), both**2 / sum(square.value**2 / square.freedom for square in counted)


def pooled_seeds(methods: Sequence[Mapping[int, np.ndarray]]) -> Square | None:
    """M_s of a difference of two of these methods (seed -> scores of problems), estimated from all of them and from the
    seeds that all have; None if there are fewer than two. Of two methods it is their difference's own."""
    shared = sorted(set.intersection(*(set(scores) for scores in methods))) if methods else []
    if len(methods) < 2 or len(shared) < 2:
        return None
    means = np.array([[scores[seed].mean() for seed in shared] for scores in methods])
    rest = means - means.mean(0) - means.mean(1, keepdims=True) + means.mean()
    freedom = (len(methods) - 1) * (len(shared) - 1)
    return Square(2 * len(methods[0][shared[0]]) * float((rest**2).sum()) / freedom, freedom)


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
