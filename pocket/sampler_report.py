"""What the study of samplers inside RL shows: tables of outcomes and of what happened inside, a figure, and a page."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from pathlib import Path
from statistics import fmean
from typing import Any, NamedTuple

import numpy as np
from board_plan import SEEDS, START
from board_statistics import Mean, mean_of, percent, points
from pages import reading
from sampler_runs import CURES, ESTIMATORS, NO_CURE, SAMPLERS

from d1.show.curves import panels, save_figure
from d1.show.tables import markdown_table

Line = dict[str, Any]
EXACT = "exact"
GOAL = 2.5  # times less compute to exact's final accuracy
SECONDS, TOKENS = "seconds", "compute_tokens"
STYLES = ("-", "--", ":", "-.", "x-")  # of `CURES`


class Setup(NamedTuple):
    """What runs of several seeds have in common."""

    task: str
    estimator: str
    sampler: str
    cure: str

    @property
    def label(self) -> str:
        return self.sampler if self.cure == NO_CURE else f"{self.sampler}, {self.cure}"


class Results:
    """The lines of one split at one rate and budget, the last of each run, by setup and seed."""

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
        """Task and estimator of those runs that can be compared."""
        return [(task, one) for task in dict.fromkeys(s.task for s in self.lines) for one in ESTIMATORS]

    def finals(self, setup: Setup) -> dict[int, np.ndarray]:
        """Seed -> (problems,) 1 where solved at the end; a run that did not stay finite has solved nothing."""
        found = {}
        for seed, line in self.lines.get(setup, {}).items():
            start = self.starts[setup.task, seed]
            found[seed] = np.zeros_like(start) if line["not_finite"] else solved(line["points"][-1])
        return found

    def curve(self, setup: Setup, of: str, seeds: Iterable[int]) -> tuple[np.ndarray, np.ndarray]:
        """Seconds or tokens, and the mean over seeds of the accuracy there: straight lines between points, and after
        its last point a run stays where it is."""
        kept = []
        for seed in seeds:
            line = self.lines[setup][seed]
            places = [0.0, *(point[of] for point in line["points"])]
            values = [self.starts[setup.task, seed], *map(solved, line["points"])]
            kept.append((places, [value.mean() for value in values]))
        grid = np.unique(np.concatenate([places for places, _ in kept]))
        return grid, np.mean([np.interp(grid, *one) for one in kept], axis=0)

    def logged(self, setup: Setup, name: str, last: bool) -> float | None:
        """The mean over runs of the first, or last, three logs that have a metric."""
        found = []
        for line in self.lines[setup].values():
            values = [log[name] for log in line["logs"] if name in log]
            found += [fmean(values[-3:] if last else values[:3])] if values else []
        return fmean(found) if found else None


def solved(point: Line) -> np.ndarray:
    return np.array([*map(int, point["right"])], dtype=float)


def first_reach(places: np.ndarray, values: np.ndarray, level: float) -> float | None:
    """Where a curve of straight lines first is at `level` or above; None if nowhere."""
    for i, value in enumerate(values):
        if value >= level:
            if i == 0:
                return float(places[0])
            return float(np.interp(level, [values[i - 1], value], [places[i - 1], places[i]]))
    return None


def paired(a: dict[int, np.ndarray], b: dict[int, np.ndarray]) -> Mean:
    """b - a, of the seeds that both have."""
    return mean_of(np.stack([b[seed] - a[seed] for seed in sorted(a.keys() & b.keys())]))


class Outcome(NamedTuple):
    """A setup beside the exact sampler, of the seeds that both have. Spent is (seconds, tokens) to a level."""

    final: Mean
    to_start: Mean
    to_exact: Mean | None
    near: list[float | None]  # to 95% of exact's final accuracy
    whole: list[float | None]  # to all of it
    less: list[float | None]  # exact's own `whole` over this one's
    diverged: str
    seeds: int

    @property
    def meets(self) -> bool:
        """Whether both seconds and tokens were cut as far as the goal says, without a loss beyond the interval."""
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
    bad = sum(bool(line["not_finite"]) for line in results.lines[setup].values())
    return Outcome(
        final=mean_of(np.stack([own[seed] for seed in sorted(own)])),
        to_start=to_start,
        to_exact=paired(reference, own) if shared and setup != exact else None,
        near=near or [None, None],
        whole=whole or [None, None],
        less=less or [None, None],
        diverged=f"{bad} / {len(own)}" + (", below the start" if to_start.high < 0 else ""),
        seeds=len(shared),
    )


def shown(value: float | None, digits: int = 1, scale: float = 1.0) -> str:
    return "" if value is None else f"{value / scale:.{digits}f}"


def outcomes_table(results: Results, setups: Sequence[Setup]) -> str:
    rows = []
    for setup in setups:
        found = outcome(results, setup)
        (near_s, near_t), (whole_s, whole_t), (less_s, less_t) = found.near, found.whole, found.less
        rows.append(
            [
                setup.label,
                str(len(results.lines[setup])),
                percent(found.final),
                points(found.to_start),
                points(found.to_exact) if found.to_exact else "",
                found.diverged,
                f"{shown(near_s)}, {shown(near_t, 2, 1e6)}" if near_s is not None else "never",
                f"{shown(whole_s)}, {shown(whole_t, 2, 1e6)}" if whole_s is not None else "never",
                f"{shown(less_s)}, {shown(less_t)}" if less_s is not None else "",
            ]
        )
    header = ["sampler", "seeds", "final", "less start's", "less exact's", "diverged", "to 95%", "to 100%", "cut by"]
    return markdown_table(header, rows)


def inside_table(results: Results, setups: Sequence[Setup]) -> str:
    """First and last logs of what could make a run unstable."""
    names = {
        "sampled, %": ("rewards/accuracy/mean", 100.0, 0),
        "tokens fed": ("sampling/forward_tokens", 1.0, 0),
        "mismatch, mean": ("sampling/logp_difference_mean", 1.0, 3),
        "mismatch, abs": ("sampling/logp_difference_abs", 1.0, 3),
        "largest p / p sampled": ("sampling/ratio_max", 1.0, 1),
        "entropy": ("entropy", 1.0, 3),
        "KL": ("kl", 1.0, 3),
        "largest ratio": ("ratio_max", 1.0, 1),
        "mean weight": ("sampling/weight_mean", 1.0, 2),
        "at the cap, %": ("sampling/weight_capped", 100.0, 0),
    }
    rows = []
    for setup in setups:
        cells = []
        for name, times, digits in names.values():
            ends = [results.logged(setup, name, last) for last in (False, True)]
            cells.append(" to ".join(f"{times * end:.{digits}f}" for end in ends if end is not None))
        updates = fmean(line["points"][-1]["step"] for line in results.lines[setup].values() if line["points"])
        rows.append([setup.label, f"{updates:.0f}", *cells])
    return markdown_table(["sampler", "updates", *names], rows)


def draw(results: Results, path: Path) -> None:
    """A panel a task and estimator: accuracy against processor seconds, cures dashed in their sampler's colour."""
    groups = [group for group in results.groups if results.setups(*group)]
    figure, axes = panels(1, len(groups), size=(5.6 * len(groups), 4.0), share_y=True)
    for axis, (task, estimator) in zip(axes, groups, strict=True):
        for setup in results.setups(task, estimator):
            places, values = results.curve(setup, SECONDS, results.lines[setup])
            colour, style = f"C{SAMPLERS.index(setup.sampler)}", STYLES[[*CURES].index(setup.cure)]
            axis.plot(places, 100 * values, style, color=colour, label=setup.label, linewidth=1.3)
        axis.set(title=f"{task}, {estimator}", xlabel="processor seconds")
        axis.legend(fontsize="x-small")
    axes[0].set_ylabel("solved, %")
    save_figure(figure, path)


def budgets(lines: Sequence[Line]) -> dict[tuple[str, float, float], list[Line]]:
    """(split, rate, seconds) -> the lines of trainings, in their order."""
    found: dict[tuple[str, float, float], list[Line]] = {}
    for line in lines:
        run = line["run"]
        if run["sampler"] != START:
            found.setdefault((run["split"], run["learning_rate"], run["seconds"]), []).append(line)
    return found


def validation_table(lines: Sequence[Line]) -> str:
    """What was looked at before the study."""
    rows = []
    for line in lines:
        run = line["run"]
        if run["split"] == "validation" and run["sampler"] != START:
            ends = [f"{100 * solved(point).mean():.1f} at {point['seconds']:.0f} s" for point in line["points"]]
            setup = Setup(run["task"], run["estimator"], run["sampler"], run["cure"])
            rows.append([setup.task, setup.estimator, setup.label, str(run["seed"]), f"{run['learning_rate']:g}"])
            rows[-1].append(", ".join(ends))
    return markdown_table(["task", "estimator", "sampler", "seed", "rate", "solved, %"], rows) if rows else "Nothing.\n"


def write_report(lines: Sequence[Line], path: Path) -> str:
    """Writes the page, and the figure beside it, of the budget with the most runs; returns what to say about it."""
    on_test = {key: own for key, own in budgets(lines).items() if key[0] == "test"}
    if not on_test:
        return "No run on the test split is done yet."
    (_, rate, seconds), own = max(on_test.items(), key=lambda item: len(item[1]))
    starts = [line for line in lines if line["run"]["sampler"] == START and line["run"]["split"] == "test"]
    results = Results([*starts, *own])
    path.parent.mkdir(parents=True, exist_ok=True)
    figure = path.with_suffix(".png")
    draw(results, figure)
    text = HEAD.format(seconds=seconds, rate=rate, reading=reading(path), figure=figure.name, goal=GOAL)
    done = sum(line["run"]["cure"] == NO_CURE for line in own)
    whole = len({line["run"]["task"] for line in own}) * len(SAMPLERS) * len(ESTIMATORS) * len(SEEDS)
    text += f"**Partial: {done} of {whole} runs without a cure; rows are of the seeds there are.**\n\n" * (done < whole)
    for task, estimator in results.groups:
        setups = results.setups(task, estimator)
        if setups:
            text += f"## {task}, {estimator}\n\n{outcomes_table(results, setups)}\n{inside_table(results, setups)}\n"
    met = [setup for group in results.groups for setup in results.setups(*group) if outcome(results, setup).meets]
    named = "; ".join(f"{setup.task}, {setup.estimator}: {setup.label}" for setup in met) or "none"
    text += f"Of setups with {len(SEEDS)} seeds, those that cut seconds and tokens by {GOAL} without a loss beyond the "
    text += f"interval: {named}.\n\n"
    text += f"## What was chosen on validation problems\n\n{validation_table(lines)}"
    path.write_text(text)
    return f"{len(own)} runs are done. Tables: {path}"


HEAD = """# Fast samplers inside online RL

Written by `python pocket/sampler_study.py`. From SFT, every run trains for {seconds:g} seconds of one core at a
constant rate of {rate:g}, with the other settings of pocket.yaml, and samples its rollouts with another sampler. Every
model is judged by the **exact** sampler, greedy, on the test problems. `one_step` is d1's estimator; `replay` scores
each token in the state it was revealed in, all else being d1's, so that estimators alone differ. Levels of samplers are
those of `benchmarks/samplers.py`.

{reading}

![Solved by the exact sampler against processor seconds]({figure})

- final: percent solved at the end, with 95% intervals over seeds and problems; differences are paired by both.
- diverged: runs whose loss or weights were no longer finite; "below the start" where the final accuracy is, by more
  than the interval.
- to 95%, to 100%: processor seconds, and millions of tokens through the body (backward counted twice), at which the
  mean curve first reaches that share of the final accuracy that the exact sampler has with the same estimator; 0 where
  SFT has it already. A first crossing of a noisy curve comes early, for all samplers alike.
- cut by: seconds and tokens of the exact sampler to its own final accuracy over those of the row. The goal is {goal}.
- Inside, "first to last", means of three rollouts each: sampled: accuracy of the rollouts, by the run's own sampler;
  mismatch: recorded log-probabilities of the sampler less those of the trained policy, nats a token; entropy: of the
  policy where it is scored; KL: to SFT's policy; largest ratio: of new to old probabilities in an update.

"""
