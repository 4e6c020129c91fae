"""The uncertainty of a mean over seeds and problems.

Every seed answers the same problems, so a table of scores (seeds, problems) varies by seed, by problem and by both
together: a crossed design with random effects and one observation per cell (Searle, Casella and McCulloch 1992,
chapter 4). The variance of the mean is (M_s + max(0, M_p - M_e)) / (seeds x problems), where M are the mean squares of
seeds, problems and the rest. Intervals and tests are Student's, with seeds - 1 degrees of freedom: the seeds are few,
so their own variance is the uncertain part. Without the problems' share they are those of SciPy's `ttest_1samp` on the
means of the seeds. For one seed, the interval is over problems only.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from scipy.stats import t as student

LEVEL = 0.95
LEAST_SEEDS = 5  # for a test; with fewer, only an interval is given


class Mean(NamedTuple):
    """A mean with its 95% interval, and the two-sided p-value for the hypothesis that it is 0, which is None (not
    tested) with fewer than `LEAST_SEEDS` seeds."""

    value: float
    low: float
    high: float
    p: float | None


def mean_of(scores: np.ndarray) -> Mean:
    """The mean of a table (seeds, problems) of scores or differences of scores.

    Raises:
        ValueError: there are fewer than two problems.
    """
    seeds, problems = scores.shape
    if problems < 2:
        raise ValueError(f"an interval needs at least two problems, got {seeds} seeds x {problems} problems")
    value, error = float(scores.mean()), float(standard_error(scores))
    freedom = seeds - 1 if seeds > 1 else problems - 1
    half = float(student.ppf((1 + LEVEL) / 2, freedom)) * error
    p = None
    if seeds >= LEAST_SEEDS:
        p = 2 * float(student.sf(abs(value) / error, freedom)) if error > 1e-9 else float(abs(value) < 1e-12)
    return Mean(value, value - half, value + half, p)


def standard_error(scores: np.ndarray) -> np.ndarray:
    """The standard error of the mean of each table of scores: (..., seeds, problems) -> (...)."""
    seeds, problems = scores.shape[-2:]
    by_seed, by_problem = scores.mean(-1), scores.mean(-2)
    of_problems = by_problem.var(-1, ddof=1) * seeds
    if seeds == 1:
        return np.sqrt(of_problems / problems)
    of_seeds = by_seed.var(-1, ddof=1) * problems
    rest = scores - by_seed[..., None] - by_problem[..., None, :] + scores.mean((-2, -1))[..., None, None]
    of_rest = (rest**2).sum((-2, -1)) / ((seeds - 1) * (problems - 1))
    return np.sqrt((of_seeds + np.maximum(0, of_problems - of_rest)) / (seeds * problems))
