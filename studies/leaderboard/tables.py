"""The final table of each setup and budget, with its intervals and tests.

Scores are arrays (methods, seeds, problems) of 0 and 1: every seed of every method answers the same problems. A draw
takes seeds with replacement and, independently, problems with replacement, the same for all methods, so differences are
paired (Owen 2007, "The pigeonhole bootstrap"). SciPy's `bootstrap` resamples along one axis only.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass
from itertools import combinations, product
from typing import NamedTuple

import networkx
import numpy as np

from studies.leaderboard.plan import CANDIDATES, REFERENCE, START, Line, Protocol, Run, Setup
from studies.reports import Interval, holm

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


class Place(NamedTuple):
    """A method in a table, by the judge "exact"; `less` is its difference to d1."""

    solved: Interval
    less: Interval
    not_worse: bool
    seeds: int


@dataclass(frozen=True)
class Table:
    """A setup at a budget.

    Attributes:
        runs: method -> seed -> the line of the run; `START` is among the methods.
        places: by method, the most accurate first.
        order: of the methods that have all seeds.
        few: why a method is planned with fewer seeds.
    """

    setup: Setup
    budget: int
    runs: dict[str, dict[int, Line]]
    places: dict[str, Place]
    order: Order
    few: dict[str, str]


def outcomes(lines: dict[int, Line], seeds: Iterable[int], judge: str = "exact") -> np.ndarray:
    """(seeds, problems) of 0 and 1. A start without SFT has one model, whatever the seed."""
    texts = [lines[seed if seed in lines else 0]["sealed"][judge] for seed in seeds]
    return np.array([[*map(int, text)] for text in texts])


def tables_of(results: dict[Run, Line], protocol: Protocol) -> Iterator[Table]:
    """The tables in which every planned method has its first seeds; candidates have ranks once all runs are done."""
    held = CANDIDATES if protocol.missing(results) else ()
    for setup, budget in product(protocol.setups, reversed(protocol.budgets)):
        few = protocol.fewer_seeds(protocol.choices(results, setup))
        planned = [name for name in protocol.methods if budget == protocol.budgets[0] or name not in few]
        runs: dict[str, dict[int, Line]] = {}
        for run, line in results.items():
            named = run.method in (*planned, START)
            if named and run.stage == "final" and run.setup == setup and run.budget in (budget, 0):
                runs.setdefault(run.method, {})[run.seed] = line
        if START in runs and all({*range(protocol.few)} <= runs.get(name, {}).keys() for name in planned):
            places, (p_values, ranks, ties) = placed(runs, protocol, few)
            ranks = {name: rank for name, rank in ranks.items() if name not in held}
            yield Table(setup, budget, runs, places, Order(p_values, ranks, [tie - {*held} for tie in ties]), few)


def placed(
    runs: dict[str, dict[int, Line]], protocol: Protocol, fewer: Collection[str]
) -> tuple[dict[str, Place], Order]:
    """The places of all methods: those with all seeds on these, the others on the first few. Differences to d1 are on
    the seeds that both have. There is an order only once all methods that are not in `fewer` have all seeds."""
    groups = {
        seeds: [name for name in runs if set(seeds) <= runs[name].keys() or (name, len(runs[name])) == (START, 1)]
        for seeds in (tuple(range(protocol.seeds)), tuple(range(protocol.few)))
    }
    scores = {
        seeds: np.stack([outcomes(runs[name], seeds) for name in names]) for seeds, names in groups.items() if names
    }
    means = {seeds: dict(zip(groups[seeds], of.mean((1, 2)), strict=True)) for seeds, of in scores.items()}
    draws = {seeds: dict(zip(groups[seeds], resampled_means(of), strict=True)) for seeds, of in scores.items()}
    every, few = groups
    places = {}
    for name in groups[few]:
        own = every if name in groups[every] else few
        shared = own if REFERENCE in groups[own] else few
        less = draws[shared][name] - draws[shared][REFERENCE]
        difference = interval(means[shared][name] - means[shared][REFERENCE], less)
        places[name] = Place(interval(means[own][name], draws[own][name]), difference, not_worse(less), len(own))
    in_order = dict(sorted(places.items(), key=lambda item: -item[1].solved.value))
    ranked = [name for name in runs if name not in (START, *fewer)]
    ranked = ranked if {*ranked} <= {*groups[every]} else []
    compared = order({name: means[every][name] for name in ranked}, {name: draws[every][name] for name in ranked})
    return in_order, compared


class Duel(NamedTuple):
    """A candidate's difference to a published method in a table, with Holm's p-value over all duels."""

    candidate: str
    table: Table
    other: str
    difference: Interval
    p_value: float

    @property
    def won(self) -> bool:
        return self.difference.value > 0 and self.p_value < LEVEL


def duels(tables: Iterable[Table]) -> list[Duel]:
    """Each candidate against every published method, in every setup at both budgets, on the seeds that both have."""
    found = []
    for table, candidate in product(tables, CANDIDATES):
        if candidate not in table.places:
            continue
        for other in (name for name in table.places if name not in (*CANDIDATES, START)):
            seeds = sorted(table.runs[candidate].keys() & table.runs[other].keys())
            scores = np.stack([outcomes(table.runs[name], seeds) for name in (candidate, other)])
            ours, theirs = resampled_means(scores)
            difference = interval(scores[0].mean() - scores[1].mean(), ours - theirs)
            found.append(Duel(candidate, table, other, difference, p_value(ours - theirs)))
    return [duel._replace(p_value=p) for duel, p in zip(found, holm([duel.p_value for duel in found]), strict=True)]


def order_kept(small: Table, large: Table) -> Interval:
    """Spearman's correlation of two tables over the methods and seeds of the second, with its interval."""
    names = [name for name in large.places if name != START and name in small.runs]
    seeds = sorted(set.intersection(*({*table.runs[name]} for table in (small, large) for name in names)))
    of_tables = [np.stack([outcomes(table.runs[name], seeds) for name in names]) for table in (small, large)]
    (value,) = rank_correlations(*(scores.mean((1, 2))[:, None] for scores in of_tables))
    draws = rank_correlations(*(resampled_means(scores, seed=seed) for seed, scores in enumerate(of_tables)))
    return interval(value, draws)
