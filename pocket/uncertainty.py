"""The uncertainty of a mean over seeds and problems.

Every seed answers the same problems, so a table of scores (seeds, problems) varies by seed, by problem and by both
together: a crossed design with random effects and one observation per cell (Searle, Casella and McCulloch 1992,
chapter 4). With the mean squares M of seeds, problems and the rest, the variance of the mean has two parts, each
divided by seeds x problems: M_s, and max(0, M_p - M_e). The seeds' part has Student's t with seeds - 1 degrees of
freedom, the problems' part with problems - 1; their half-widths are joined as the root of the sum of squares (Graybill
and Wang 1980). Without a part of the problems this is SciPy's `ttest_1samp` on the means of the seeds. One seed has
only the problems' part.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from scipy.optimize.elementwise import find_root
from scipy.special import stdtrit

LEVEL = 0.95
LEAST_SEEDS = 5  # for a test; with fewer, only an interval is given
SMALLEST = -80.0  # the logarithm of the smallest p-value


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
    value, half = float(scores.mean()), float(half_width(scores, np.log(1 - LEVEL)))
    return Mean(value, value - half, value + half, float(p_values(scores)) if seeds >= LEAST_SEEDS else None)


def half_width(scores: np.ndarray, log_alpha: float) -> np.ndarray:
    """Half of the interval of each mean at level 1 - alpha: (..., seeds, problems) -> (...)."""
    return joined(log_alpha, *standard_errors(scores), *scores.shape[-2:])


def p_values(scores: np.ndarray) -> np.ndarray:
    """The two-sided p-value of each mean being 0, which is the level at which the interval ends at 0: (..., seeds,
    problems) -> (...)."""

    def beyond(log_alpha: np.ndarray, size: np.ndarray, of_seeds: np.ndarray, of_problems: np.ndarray) -> np.ndarray:
        return joined(log_alpha, of_seeds, of_problems, *scores.shape[-2:]) - size

    given = abs(scores.mean((-2, -1))), *standard_errors(scores)
    found = np.where(beyond(np.array(SMALLEST), *given) > 0, find_root(beyond, (SMALLEST, 0.0), args=given).x, SMALLEST)
    return np.where(given[0] < 1e-12, 1.0, np.exp(found))


def joined(
    log_alpha: float | np.ndarray, of_seeds: np.ndarray, of_problems: np.ndarray, seeds: int, problems: int
) -> np.ndarray:
    tail = np.exp(log_alpha) / 2
    return np.hypot(stdtrit(max(1, seeds - 1), tail) * of_seeds, stdtrit(problems - 1, tail) * of_problems)


def standard_errors(scores: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """The seeds' and the problems' part of the standard error of each mean: (..., seeds, problems) -> two of (...)."""
    seeds, problems = scores.shape[-2:]
    by_seed, by_problem = scores.mean(-1), scores.mean(-2)
    of_problems = by_problem.var(-1, ddof=1) / problems
    if seeds == 1:
        return np.zeros_like(of_problems), np.sqrt(of_problems)
    rest = scores - by_seed[..., None] - by_problem[..., None, :] + scores.mean((-2, -1))[..., None, None]
    of_rest = (rest**2).sum((-2, -1)) / ((seeds - 1) * (problems - 1) * seeds * problems)
    return np.sqrt(by_seed.var(-1, ddof=1) / seeds), np.sqrt(np.maximum(0, of_problems - of_rest))
