"""The uncertainty of a mean over seeds and problems.

Every seed answers the same problems, so a table of scores (seeds, problems) varies by seed, by problem and by both
together: a crossed design with random effects and one observation per cell (Searle, Casella and McCulloch 1992,
chapter 4). The variance of the mean is (M_s + M_p - M_e) / (seeds x problems), where M are the mean squares of seeds,
problems and the rest, with Satterthwaite's degrees of freedom. If M_s < M_e, drop the seed term; if M_p < M_e, drop the
problem term. For one seed, the interval is over problems only. SciPy has the distribution, but not this design.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import numpy as np
from scipy.stats import t as student

LEVEL = 0.95


class Mean(NamedTuple):
    """A mean with its 95% interval, and the two-sided p-value for the hypothesis that it is 0."""

    value: float
    low: float
    high: float
    p: float


def mean_of(scores: np.ndarray) -> Mean:
    """The mean of a table (seeds, problems) of scores or differences of scores."""
    value = float(scores.mean())
    variance, freedom = variance_of_mean(scores)
    if variance <= 1e-18:  # all scores are equal, so the variance cannot be estimated
        return Mean(value, value, value, 1.0 if abs(value) < 1e-12 else 0.0)
    error = math.sqrt(variance)
    half = float(student.ppf((1 + LEVEL) / 2, freedom)) * error
    return Mean(value, value - half, value + half, 2 * float(student.sf(abs(value) / error, freedom)))


def variance_of_mean(scores: np.ndarray) -> tuple[float, float]:
    """The variance of the mean of a table (seeds, problems), and its degrees of freedom.

    Raises:
        ValueError: there are fewer than two problems.
    """
    seeds, problems = scores.shape
    if problems < 2:
        raise ValueError(f"an interval needs at least two problems, got {seeds} seeds x {problems} problems")
    total = scores.mean()
    by_problem, by_seed = scores.mean(0) - total, scores.mean(1) - total
    # Each mean square comes with its degrees of freedom.
    of_problems = seeds * float((by_problem**2).sum()) / (problems - 1), problems - 1
    if seeds == 1:
        return of_problems[0] / problems, of_problems[1]
    of_seeds = problems * float((by_seed**2).sum()) / (seeds - 1), seeds - 1
    rest, freedom = scores - total - by_problem - by_seed[:, None], (seeds - 1) * (problems - 1)
    of_rest = float((rest**2).sum()) / freedom, freedom
    counted = [square for square in (of_seeds, of_problems) if square[0] > of_rest[0]]
    if len(counted) == 2:
        counted.append((-of_rest[0], freedom))
    counted = counted or [of_rest]
    total_square = sum(square for square, _ in counted)
    if total_square <= 0:
        return 0.0, 1.0
    return total_square / (seeds * problems), total_square**2 / sum(one**2 / free for one, free in counted)
