"""The report of the study of samplers inside RL: tables of outcomes and of training metrics, a figure, and a page."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from statistics import fmean

from d1.show.curves import OKABE_ITO, legend, panels, save_figure
from d1.show.tables import markdown_table
from studies.leaderboard.plan import START
from studies.leaderboard.statistics import percent, points
from studies.pages import reading
from studies.samplers.outcomes import GOAL, SECONDS, Line, Results, Setup, of_largest_budget, outcome, solved
from studies.samplers.runs import CURES, ESTIMATORS, NO_CURE, SAMPLERS, SEEDS

STYLES = ("-", ":", "-.", "x-", "+-", "o--", "s--", "^--", "v--")  # of `CURES`


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
                shown(results.own(setup), scale=0.01),
                points(found.to_start),
                points(found.to_exact) if found.to_exact else "",
                found.diverged,
                f"{shown(near_s)}, {shown(near_t, 2, 1e6)}" if near_s is not None else "never",
                f"{shown(whole_s)}, {shown(whole_t, 2, 1e6)}" if whole_s is not None else "never",
                f"{shown(less_s)}, {shown(less_t)}" if less_s is not None else "",
            ]
        )
    header = ["sampler", "seeds", "final", "own sampler, %", "difference to start", "difference to exact", "diverged"]
    header += ["to 95%", "to 100%", "reduction"]
    return markdown_table(header, rows)


def inside_table(results: Results, setups: Sequence[Setup]) -> str:
    """First and last logs of metrics that could show an unstable run."""
    names = {
        "sampled, %": ("rewards/accuracy/mean", 100.0, 0),
        "tokens processed": ("sampling/forward_tokens", 1.0, 0),
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
    """Plots accuracy against processor seconds, one row per task, one column per estimator; cures have their sampler's
    colour."""
    columns, rows = len(ESTIMATORS), len(results.groups) // len(ESTIMATORS)
    figure, axes = panels(rows, columns, size=(4.8 * columns, 3.4 * rows), share_y=True)
    for axis, (task, estimator) in zip(axes, results.groups, strict=True):
        for setup in results.setups(task, estimator):
            places, values = results.curve(setup, SECONDS, results.lines[setup])
            colour, style = OKABE_ITO[SAMPLERS.index(setup.sampler)], STYLES[[*CURES].index(setup.cure)]
            axis.plot(places, 100 * values, style, color=colour, label=setup.label, linewidth=1.3)
        axis.set(title=f"{task}, {estimator}")
        axis.set_visible(bool(results.setups(task, estimator)))
    legend(figure)
    figure.supxlabel("processor seconds")
    figure.supylabel("solved, %")
    save_figure(figure, path)


def validation_table(lines: Sequence[Line]) -> str:
    """The runs on validation problems, which were made before the study."""
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
    """Writes the page and its figure, for each task's budget with the most runs; returns a message."""
    by_task = of_largest_budget(lines)
    if not by_task:
        return "No run on the test split is done yet."
    own = [line for task in by_task.values() for line in task]
    starts = [line for line in lines if line["run"]["sampler"] == START and line["run"]["split"] == "test"]
    results = Results([*starts, *own])
    path.parent.mkdir(parents=True, exist_ok=True)
    figure = path.with_suffix(".png")
    draw(results, figure)
    text = HEAD.format(reading=reading(path), figure=figure.name, goal=GOAL)
    for task, lines_of_task in by_task.items():
        text += task_heading(task, lines_of_task)
        for estimator in ESTIMATORS:
            if setups := results.setups(task, estimator):
                text += (
                    f"### {task}, {estimator}\n\n{outcomes_table(results, setups)}\n{inside_table(results, setups)}\n"
                )
    met = [setup for group in results.groups for setup in results.setups(*group) if outcome(results, setup).meets]
    named = "; ".join(f"{setup.task}, {setup.estimator}: {setup.label}" for setup in met) or "none"
    text += f"Of setups with {len(SEEDS)} seeds, those that cut seconds and tokens by {GOAL} without a loss beyond the "
    text += f"interval: {named}.\n\n"
    text += f"## What was chosen on validation problems\n\n{validation_table(lines)}"
    path.write_text(text)
    return f"{len(own)} runs are done. Tables: {path}"


def task_heading(task: str, lines: Sequence[Line]) -> str:
    """The heading of a task: the runs in its tables."""
    run = lines[0]["run"]
    text = (
        f"## {task}\n\nRuns of {run['seconds']:g} processor seconds at a constant rate of {run['learning_rate']:g}.\n\n"
    )
    runs = [line["run"] for line in lines if line["run"]["cure"] == NO_CURE]
    done, whole = len(runs), len(SAMPLERS) * len({run["estimator"] for run in runs}) * len(SEEDS)
    partial = f"**Partial: {done} of {whole} runs without a cure; rows are of the seeds there are.**\n\n"
    return text + partial * (done < whole)


HEAD = """# Fast samplers inside online RL

Written by `python -m studies.samplers.run`. All runs of a task start from SFT and train for the same seconds on one
core, with the settings of pocket.yaml and different samplers for their rollouts. Every model is judged by the **exact**
sampler, greedy, on the test problems. `one_step` is d1's estimator. `replay` scores each token in the state in which it
was revealed; everything else is d1's, so only the estimators differ. `tracerl` has TraceRL's values. The samplers'
levels were chosen on validation problems by an earlier `studies/samplers/frontier.py`.

{reading}

![Solved by the exact sampler against processor seconds]({figure})

- final: percent solved at the end, with 95% intervals over seeds and problems; differences are paired by both. The
  seeds' variance of differences to exact is estimated from all rows of a table together.
- own sampler: percent that the last model solves, greedy, with the sampler of its own rollouts.
- diverged: runs whose loss or weights were no longer finite; "below the start" if the final accuracy is below the
  start's by more than the interval.
- to 95%, to 100%: processor seconds, and millions of tokens processed by the transformer (backward passes count twice),
  at which the mean curve first reaches that share of the final accuracy of the exact sampler with the same estimator; 0
  if SFT has it already. The first crossing of a noisy curve comes too early, for all samplers alike.
- reduction: seconds and tokens that the exact sampler needs for its own final accuracy, divided by those of the row.
  The goal is {goal}.
- Training metrics are "first to last", each a mean of three rollouts. sampled: accuracy of the rollouts, with the run's
  own sampler; mismatch: recorded log-probabilities of the sampler minus those of the trained policy, in nats per token;
  entropy: of the policy on scored tokens; KL: to SFT's policy; largest ratio: of new to old probabilities in an update.

"""
