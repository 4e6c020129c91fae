"""The final table of each setup and budget, with its intervals and tests.

Scores are arrays (seeds, problems) of 0 and 1: every seed of every method answers the same problems, and differences
are paired by seed and problem. `pocket/uncertainty.py` gives intervals and p-values.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass
from itertools import combinations, product
from statistics import fmean
from typing import NamedTuple

import networkx
import numpy as np
from scipy.stats import spearmanr, ttest_1samp

from pocket.uncertainty import LEAST_SEEDS, Mean, mean_of
from studies.leaderboard.plan import CANDIDATES, REFERENCE, START, Line, Protocol, Run, Setup
from studies.reports import Interval, holm, p_above

LEVEL, MARGIN = 0.05, 0.02


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


def order(scores: Mapping[str, np.ndarray]) -> Order:
    """Compares all pairs of methods, given the (seeds, problems) of each; there is no order with fewer than
    `LEAST_SEEDS` seeds."""
    if any(len(of) < LEAST_SEEDS for of in scores.values()):
        return Order({}, {}, [])
    names = sorted(scores, key=lambda name: -scores[name].mean())
    pairs = [*combinations(names, 2)]
    tested = [mean_of(scores[a] - scores[b]).p for a, b in pairs]
    adjusted = dict(zip(pairs, holm([p for p in tested if p is not None]), strict=True))
    separated = [pair for pair, p in adjusted.items() if p < LEVEL]
    better, worse = ([pair[side] for pair in separated] for side in (0, 1))
    ranks = {name: (1 + worse.count(name), len(names) - better.count(name)) for name in names}
    tied = networkx.Graph(pair for pair in pairs if pair not in separated)
    tied.add_nodes_from(names)
    ties = sorted(map(set, networkx.find_cliques(tied)), key=lambda one: sorted(map(names.index, one)))
    return Order(adjusted, ranks, ties)


class Place(NamedTuple):
    """A method in a table, by the judge "exact".

    Attributes:
        less: its difference to d1.
        not_worse: whether `less` is above -`MARGIN` (one-sided, 5%); None if it is not tested.
    """

    solved: Mean
    less: Mean
    not_worse: bool | None
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
    every, few = range(protocol.seeds), range(protocol.few)

    def with_all(seeds: Iterable[int], name: str) -> bool:
        return {*seeds} <= runs[name].keys() or (name, len(runs[name])) == (START, 1)

    places = {}
    for name in (name for name in runs if with_all(few, name)):
        own = every if with_all(every, name) else few
        shared = own if with_all(own, REFERENCE) else few
        less = outcomes(runs[name], shared) - outcomes(runs[REFERENCE], shared)
        p = p_above(less, -MARGIN)
        not_worse = None if p is None else p < LEVEL
        solved = mean_of(outcomes(runs[name], own if len(runs[name]) > 1 else [0]))
        places[name] = Place(solved, mean_of(less), not_worse, len(own))
    in_order = dict(sorted(places.items(), key=lambda item: -item[1].solved.value))
    ranked = [name for name in runs if name not in (START, *fewer)]
    complete = all(with_all(every, name) for name in ranked)
    return in_order, order({name: outcomes(runs[name], every) for name in ranked if complete})


class Duel(NamedTuple):
    """A candidate's difference to a published method in a table, with Holm's p-value over all duels that are tested."""

    candidate: str
    table: Table
    other: str
    difference: Mean

    @property
    def won(self) -> bool:
        return self.difference.value > 0 and self.difference.p is not None and self.difference.p < LEVEL


def duels(tables: Iterable[Table]) -> list[Duel]:
    """Each candidate against every published method, in every setup at both budgets, on the seeds that both have."""
    found = []
    for table, candidate in product(tables, CANDIDATES):
        for other in (name for name in table.places if name not in (*CANDIDATES, START)):
            seeds = sorted(table.runs[candidate].keys() & table.runs[other].keys())
            ours, theirs = (outcomes(table.runs[name], seeds) for name in (candidate, other))
            found.append(Duel(candidate, table, other, mean_of(ours - theirs)))
    adjusted = iter(holm([duel.difference.p for duel in found if duel.difference.p is not None]))
    return [
        duel if duel.difference.p is None else duel._replace(difference=duel.difference._replace(p=next(adjusted)))
        for duel in found
    ]


def order_kept(small: Table, large: Table) -> Interval:
    """Spearman's correlation of the accuracies of a seed of `large` with the means of `small`, over the methods of
    `large`: its mean over those seeds, with Student's interval."""
    names = [name for name in large.places if name != START and name in small.runs]
    known = [small.places[name].solved.value for name in names]
    seeds = sorted(set.intersection(*({*large.runs[name]} for name in names)))
    of_seeds = np.stack([outcomes(large.runs[name], seeds).mean(1) for name in names], axis=1)
    values = [float(spearmanr(known, of).statistic) for of in of_seeds]
    low, high = ttest_1samp(values, 0).confidence_interval(1 - LEVEL)
    return Interval(fmean(values), max(-1.0, float(low)), min(1.0, float(high)))
