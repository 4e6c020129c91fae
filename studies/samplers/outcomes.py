"""Read the study of samplers inside RL: its lines by setup and seed, and each setup compared with the exact sampler."""

from __future__ import annotations

from collections.abc import Iterable
from statistics import fmean
from typing import Any, NamedTuple

import numpy as np

from pocket.uncertainty import Mean, Square, mean_of
from studies.leaderboard.plan import START
from studies.leaderboard.statistics import pooled_seeds, table
from studies.samplers.runs import CURES, ESTIMATORS, NO_CURE, SAMPLERS, SEEDS

Line = dict[str, Any]
EXACT = "exact"
GOAL = 2.5  # times less compute to exact's final accuracy
SECONDS, TOKENS = "seconds", "compute_tokens"


class Setup(NamedTuple):
    """What runs with different seeds have in common."""

    task: str
    estimator: str
    sampler: str
    cure: str

    @property
    def label(self) -> str:
        return self.sampler if self.cure == NO_CURE else f"{self.sampler}, {self.cure}"


class Results:
    """The last line of each run, of one split at one learning rate and budget, by setup and seed."""

    def __init__(self, lines: Iterable[Line]) -> None:
        self.starts: dict[tuple[str, int], np.ndarray] = {}
        self.lines: dict[Setup, dict[int, Line]] = {}
        for line in lines:
            run = line["run"]
            if run["sampler"] == START:
                self.starts[run["task"], run["seed"]] = solved(line["points"][0])
            else:
                setup = Setup(run["task"], run["estimator"], run["sampler"], run["cure"])
                self.lines.setdefault(setup, {})[run["seed"]] = line

    def setups(self, task: str, estimator: str) -> list[Setup]:
        own = [Setup(task, estimator, sampler, cure) for cure in CURES for sampler in SAMPLERS]
        return [setup for setup in own if setup in self.lines]

    @property
    def groups(self) -> list[tuple[str, str]]:
        """The groups of runs that can be compared: task and estimator."""
        return [(task, one) for task in dict.fromkeys(s.task for s in self.lines) for one in ESTIMATORS]

    def finals(self, setup: Setup) -> dict[int, np.ndarray]:
        """Seed -> (problems,), 1 if solved at the end; a run that did not stay finite has solved nothing."""
        found = {}
        for seed, line in self.lines.get(setup, {}).items():
            start = self.starts[setup.task, seed]
            found[seed] = np.zeros_like(start) if line["not_finite"] else solved(line["points"][-1])
        return found

    def curve(self, setup: Setup, of: str, seeds: Iterable[int]) -> tuple[np.ndarray, np.ndarray]:
        """Seconds or tokens, and the mean accuracy over seeds, with linear interpolation between points; after its last
        point, a run keeps its accuracy."""
        kept = []
        for seed in seeds:
            line = self.lines[setup][seed]
            places = [0.0, *(point[of] for point in line["points"])]
            values = [self.starts[setup.task, seed], *map(solved, line["points"])]
            kept.append((places, [value.mean() for value in values]))
        grid = np.unique(np.concatenate([places for places, _ in kept]))
        return grid, np.mean([np.interp(grid, *one) for one in kept], axis=0)

    def own(self, setup: Setup) -> float | None:
        return solved_by_own(self.lines[setup].values())

    def logged(self, setup: Setup, name: str, last: bool) -> float | None:
        """The mean over runs of the first, or last, three logs that have a metric."""
        found = []
        for line in self.lines[setup].values():
            values = [log[name] for log in line["logs"] if name in log]
            found += [fmean(values[-3:] if last else values[:3])] if values else []
        return fmean(found) if found else None


def solved(point: Line) -> np.ndarray:
    return np.array([*map(int, point["right"])], dtype=float)


def solved_by_own(lines: Iterable[Line]) -> float | None:
    """The share that the last models solve with the sampler of their own rollouts, greedy; None if all were exact."""
    found = [solved(line["own"]).mean() for line in lines if line.get("own")]
    return fmean(found) if found else None


def first_reach(places: np.ndarray, values: np.ndarray, level: float) -> float | None:
    """The first place where a piecewise linear curve is at `level` or above; None if there is none."""
    for i, value in enumerate(values):
        if value >= level:
            if i == 0:
                return float(places[0])
            return float(np.interp(level, [values[i - 1], value], [places[i - 1], places[i]]))
    return None


def paired(a: dict[int, np.ndarray], b: dict[int, np.ndarray], of_seeds: Square | None = None) -> Mean:
    """b - a, over the seeds that both have."""
    return mean_of(np.stack([b[seed] - a[seed] for seed in sorted(a.keys() & b.keys())]), of_seeds)


class Outcome(NamedTuple):
    """A setup compared with the exact sampler, over the seeds that both have. Lists are (seconds, tokens)."""

    final: Mean
    to_start: Mean
    to_exact: Mean | None
    near: list[float | None]  # spent to reach 95% of exact's final accuracy
    whole: list[float | None]  # spent to reach all of it
    less: list[float | None]  # exact's own `whole` divided by this one's
    diverged: str
    seeds: int

    @property
    def meets(self) -> bool:
        """Whether both seconds and tokens are reduced by the goal, without a loss of accuracy beyond the interval."""
        loss = self.to_exact is not None and self.to_exact.high < 0
        cut = all(times is not None and times >= GOAL for times in self.less)
        return cut and not loss and self.seeds == len(SEEDS)


def outcome(results: Results, setup: Setup) -> Outcome:
    exact = setup._replace(sampler=EXACT, cure=NO_CURE)
    own, reference = results.finals(setup), results.finals(exact)
    starts = {seed: results.starts[setup.task, seed] for seed in own}
    shared = sorted(own.keys() & reference.keys())
    near: list[float | None] = []
    whole: list[float | None] = []
    less: list[float | None] = []
    for of in (SECONDS, TOKENS) if shared else ():
        level = float(np.mean([reference[seed].mean() for seed in shared]))
        mine, theirs = results.curve(setup, of, shared), results.curve(exact, of, shared)
        near.append(first_reach(*mine, 0.95 * level))
        whole.append(first_reach(*mine, level))
        spent, exact_spent = whole[-1], first_reach(*theirs, level)
        less.append(exact_spent / spent if spent and exact_spent else None)
    to_start = paired(starts, own)
    of_seeds = pooled_seeds([results.finals(one) for one in results.setups(setup.task, setup.estimator)])
    bad = sum(bool(line["not_finite"]) for line in results.lines[setup].values())
    return Outcome(
        final=mean_of(table(own)),
        to_start=to_start,
        to_exact=paired(reference, own, of_seeds) if shared and setup != exact else None,
        near=near or [None, None],
        whole=whole or [None, None],
        less=less or [None, None],
        diverged=f"{bad} / {len(own)}" + (", below the start" if to_start.high < 0 else ""),
        seeds=len(shared),
    )


def of_largest_budget(lines: Iterable[Line]) -> dict[str, list[Line]]:
    """Task -> its training lines on test problems, of the learning rate and seconds that have the most lines."""
    found: dict[str, dict[tuple[float, float], list[Line]]] = {}
    for line in lines:
        run = line["run"]
        if run["sampler"] != START and run["split"] == "test":
            by_budget = found.setdefault(run["task"], {})
            by_budget.setdefault((run["learning_rate"], run["seconds"]), []).append(line)
    return {task: max(by_budget.values(), key=len) for task, by_budget in found.items()}
