"""95% intervals of the study's measures, and of a rank correlation.

All seeds of a model have the same problems. A measure is not a mean over problems, so its jackknife influences take the
place of scores (Efron and Tibshirani 1993, chapter 11): one value per problem, with the measure as their mean and the
jackknife's variance as the variance of that mean. Tables of them, or of their differences between two estimators, are
(seeds, problems), and `pocket/uncertainty.py` gives the interval over both.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from scipy.stats import norm, spearmanr

from pocket.uncertainty import LEVEL, Mean, mean_of
from studies.reports import Interval

Lines = Mapping[int, Mapping[str, Any]]  # seed -> the line of one estimator on one model


def influences(value: float, without: Sequence[float]) -> np.ndarray:
    """(problems,), from a measure and its values without each problem."""
    left_out = np.array(without)
    return value + (len(left_out) - 1) * (left_out.mean() - left_out)


def table(lines: Lines, measure: str, seeds: Sequence[int]) -> np.ndarray:
    """(seeds, problems) influences."""
    return np.stack([influences(lines[seed][measure], lines[seed]["without"][measure]) for seed in seeds])


def mean_over(lines: Lines, measure: str) -> Mean | None:
    """The mean over seeds; None for a measure that has no value because nothing is drawn."""
    seeds = sorted(lines)
    known = seeds and all(lines[seed][measure] is not None for seed in seeds)
    return mean_of(table(lines, measure, seeds)) if known else None


def difference(lines: Lines, others: Lines, measure: str) -> Mean | None:
    """The mean difference over the seeds that both have; None without any."""
    seeds = sorted(lines.keys() & others.keys())
    return mean_of(table(lines, measure, seeds) - table(others, measure, seeds)) if seeds else None


def rank_correlation(a: Sequence[float], b: Sequence[float]) -> Interval | None:
    """Spearman's rank correlation of two lists of n values, with its interval by Fisher's transformation and the
    variance (1 + r^2 / 2) / (n - 3) (Bonett and Wright 2000); None below five values or if all of a list are equal."""
    if len(a) < 5 or min(np.ptp(a), np.ptp(b)) == 0:
        return None
    value = float(spearmanr(a, b)[0])
    middle = math.atanh(min(max(value, -1 + 1e-9), 1 - 1e-9))
    half = float(norm.ppf((1 + LEVEL) / 2)) * math.sqrt((1 + value**2 / 2) / (len(a) - 3))
    return Interval(value, math.tanh(middle - half), math.tanh(middle + half))
