"""Intervals and tests of PROTOCOL.md: a two-way bootstrap over seeds and problems, Holm's correction, ranks and ties.

Scores are arrays (methods, seeds, problems) of 0 and 1: every seed of every method answers the same problems. A draw
takes seeds with replacement and, independently, problems with replacement, the same for all methods, so differences are
paired (Owen 2007, "The pigeonhole bootstrap"). SciPy's `bootstrap` resamples along one axis only.
"""

from __future__ import annotations

from collections.abc import Mapping
from itertools import combinations
from typing import NamedTuple

import networkx
import numpy as np

from studies.statistics import Interval, holm

DRAWS = 10_000
AT_ONCE = 250  # draws: what fits in the processor's cache matters more than their number
LEVEL = 0.05


def resampled_means(scores: np.ndarray, draws: int = DRAWS, seed: int = 0) -> np.ndarray:
    """The mean of each method in each draw.

    Args:
        scores: (methods, seeds, problems).
        draws: their number.
        seed: of the random numbers.

    Returns:
        (methods, draws).
    """
    generator = np.random.default_rng(seed)
    methods, seeds, problems = scores.shape
    flat = scores.transpose(1, 0, 2).reshape(seeds, -1).astype(np.float64)
    found = []
    for first in range(0, draws, AT_ONCE):
        size = min(AT_ONCE, draws - first)
        of_seeds = times_drawn(generator, size, seeds)
        of_problems = times_drawn(generator, size, problems)
        by_problem = (of_seeds @ flat).reshape(size, methods, problems)
        found.append(np.einsum("dmp,dp->md", by_problem, of_problems) / (seeds * problems))
    return np.concatenate(found, axis=1)


def times_drawn(generator: np.random.Generator, draws: int, things: int) -> np.ndarray:
    """How often each thing is taken when as many as there are are drawn with replacement: (draws, things)."""
    taken = generator.integers(things, size=(draws, things)) + things * np.arange(draws)[:, None]
    return np.bincount(taken.ravel(), minlength=draws * things).reshape(draws, things)


def interval(value: float, draws: np.ndarray) -> Interval:
    """The percentile interval of a value with its draws (draws,)."""
    low, high = np.quantile(draws, [LEVEL / 2, 1 - LEVEL / 2])
    return Interval(float(value), float(low), float(high))


def p_value(draws: np.ndarray) -> float:
    """Two-sided, of a difference with draws (draws,) being 0; at least 2 / (draws + 1)."""
    side = min(int((draws <= 0).sum()), int((draws >= 0).sum()))
    return min(1.0, 2 * (1 + side) / (len(draws) + 1))


def not_worse(draws: np.ndarray, margin: float = 0.02) -> bool:
    """Whether the one-sided 95% interval of a difference with draws (draws,) lies above -margin."""
    return bool(np.quantile(draws, LEVEL) > -margin)


def rank_correlations(a: np.ndarray, b: np.ndarray) -> np.ndarray:
    """Spearman's correlation of each column of two arrays (methods, draws) without ties: (draws,)."""
    first, second = (values.argsort(0).argsort(0) for values in (a, b))
    methods = len(a)
    return 1 - 6 * ((first - second) ** 2).sum(0) / (methods * (methods**2 - 1))


class Order(NamedTuple):
    """What all pairs of a table's methods say.

    Attributes:
        p_values: Holm's adjusted p-value of each pair, (better, worse) by their means.
        ranks: method -> (first, last): the ranks that the separated pairs leave open.
        ties: the largest sets of methods of which no two are separated, the best set first.
    """

    p_values: dict[tuple[str, str], float]
    ranks: dict[str, tuple[int, int]]
    ties: list[set[str]]

    def rank(self, name: str) -> str:
        """A method's open ranks in words: "1" or "3 to 5"; "" without a rank."""
        first, last = self.ranks.get(name, ("", ""))
        return f"{first}" if first == last else f"{first} to {last}"


def order(means: Mapping[str, float], draws: Mapping[str, np.ndarray]) -> Order:
    """Compares all pairs of methods; `means` and `draws`, (draws,) each, have the same methods."""
    names = sorted(means, key=lambda name: -means[name])
    pairs = [*combinations(names, 2)]
    adjusted = dict(zip(pairs, holm([p_value(draws[a] - draws[b]) for a, b in pairs]), strict=True))
    separated = [pair for pair, p in adjusted.items() if p < LEVEL]
    better, worse = ([pair[side] for pair in separated] for side in (0, 1))
    ranks = {name: (1 + worse.count(name), len(names) - better.count(name)) for name in names}
    tied = networkx.Graph(pair for pair in pairs if pair not in separated)
    tied.add_nodes_from(names)
    ties = sorted(map(set, networkx.find_cliques(tied)), key=lambda one: sorted(map(names.index, one)))
    return Order(adjusted, ranks, ties)
