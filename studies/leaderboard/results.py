"""How the leaderboard's results are read: from JSON lines to tables of scores (seeds, problems), paired by both."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from statistics import fmean
from typing import Any, NamedTuple

import numpy as np

from pocket.uncertainty import Mean, mean_of
from studies.json_lines import read_lines
from studies.leaderboard.plan import START, TUNING_TASKS, Run
from studies.leaderboard.statistics import pooled_seeds

RESULTS = "results.jsonl"
Line = dict[str, Any]


class Setup(NamedTuple):
    """Where methods meet: a task and what they start from."""

    task: str
    start: str

    @property
    def label(self) -> str:
        return f"{self.task} from {self.start}"


def read_results(folder: Path) -> list[Line]:
    """The results of a board, the last of each run."""
    return [*{json.dumps(line["run"], sort_keys=True): line for line in read_lines(folder / RESULTS)}.values()]


def results_of(lines: Iterable[Line], runs: Sequence[Run]) -> dict[Run, Line]:
    """The lines of these runs alone, of those that are done."""
    by_run = {Run(**line["run"]): line for line in lines}
    return {run: by_run[run] for run in runs if run in by_run}


def scores_at(results: Mapping[Run, Line], setup: Setup, method: str, point: str) -> dict[int, np.ndarray]:
    """Seed -> (problems,) 1 where solved. A run whose loss or weights were no longer finite at that point has no model
    to ask, and has solved nothing. The base model, without a seed of its own, stands for every seed."""
    found = {}
    for run, line in results.items():
        if (run.task, run.start, run.method) == (*setup, method):
            at = line["points"].get("end" if method == START else point)
            count = len(at["right"]) if at else problems_of(results, setup)
            found[run.seed] = np.array([*map(int, at["right"])], dtype=float) if at else np.zeros(count)
    return found


def problems_of(results: Mapping[Run, Line], setup: Setup) -> int:
    """How many problems a setup has, by a run of it that was evaluated."""
    for run, line in results.items():
        if (run.task, run.start) == setup and line["points"]:
            return len(next(iter(line["points"].values()))["right"])
    raise ValueError(f"no run on {setup.label} has been evaluated yet")


def check_problems(results: Mapping[Run, Line]) -> None:
    """Raises ValueError where runs of a task were judged on different problems."""
    seen: dict[tuple[str, str], str] = {}
    for run, line in results.items():
        for point in line["points"].values():
            if seen.setdefault((run.task, run.split), point["problems"]) != point["problems"]:
                raise ValueError(
                    f"{run.name} was judged on other problems than runs before it: the files in dataset/ have changed "
                    "since; begin a new board with another --output_dir"
                )


def table(scores: Mapping[int, np.ndarray]) -> np.ndarray:
    """(seeds, problems), by seed."""
    return np.stack([scores[seed] for seed in sorted(scores)])


def differences(a: Mapping[int, np.ndarray], b: Mapping[int, np.ndarray]) -> np.ndarray | None:
    """(seeds, problems) b - a, of the seeds that both have; None if there are none."""
    shared = sorted(a.keys() & b.keys())
    return np.stack([b[seed] - a[seed] for seed in shared]) if shared else None


def gains(reference: Mapping[int, np.ndarray], others: Mapping[str, Mapping[int, np.ndarray]]) -> dict[str, Mean]:
    """Each of `others` less the reference, paired by seed and problem; how far seeds vary is estimated from all."""
    of_seeds = pooled_seeds([reference, *others.values()])
    tables = {name: differences(reference, scores) for name, scores in others.items()}
    return {name: mean_of(found, of_seeds) for name, found in tables.items() if found is not None}


def methods_of(results: Mapping[Run, Line], setup: Setup) -> list[str]:
    here = [run.method for run in results if (run.task, run.start) == setup and run.method != START]
    return [*dict.fromkeys(here)]


def lines_of(results: Mapping[Run, Line], setup: Setup, method: str) -> list[Line]:
    return [line for run, line in results.items() if (run.task, run.start, run.method) == (*setup, method)]


def grid(results: Mapping[Run, Line], method: str) -> dict[tuple[float, int], dict[str, float]]:
    """(rate, mu) -> task -> share of validation problems solved; a run that did not stay finite solved none."""
    found: dict[tuple[float, int], dict[str, float]] = {}
    for run, line in results.items():
        if run.method == method:
            at = line["points"].get("end")
            share = fmean(map(int, at["right"])) if at else 0.0
            found.setdefault((run.learning_rate, run.num_iterations), {})[run.task] = share
    return found


def tuned(results: Mapping[Run, Line], runs: Sequence[Run]) -> dict[str, tuple[float, int]]:
    """The (rate, mu) of each method whose search is complete: the best mean over the tasks searched on; of equals the
    lower rate, then the smaller mu, as less is changed by them."""
    chosen = {}
    for method in dict.fromkeys(run.method for run in runs):
        if all(run in results for run in runs if run.method == method):
            found = grid(results, method)
            chosen[method] = min(found, key=lambda at: (-fmean(found[at][task] for task in TUNING_TASKS), at))
    return chosen
