"""The tables and the figure of README.md, from data/*.jsonl."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from statistics import fmean
from typing import Any

import numpy as np
from scipy import stats

from d1.show.curves import WIDTH, legend, panels, save_figure
from d1.show.tables import markdown_table
from pocket.uncertainty import mean_of
from studies.collapse.run import ARMS, BEST, DATA, RATES, STAGES, mean_accuracy, runs, setting_of
from studies.collapse.untrained import SAMPLERS, models
from studies.json_lines import read_lines
from studies.leaderboard.plan import accuracy
from studies.reports import gain, holm, p_above, percent, scores
from studies.samplers.rollouts_report import MARGIN, share

LEAST = 0.806  # a run that solves less has collapsed: 8 points below exact rollouts in studies/samplers
FIRST = 32  # rollouts
FIGURE = Path(__file__).with_name("logs.svg")
CURVES = {"rewards/accuracy/mean": "right in rollouts", "places/nll": "nll", "places/impossible": "impossible"}
CURVES |= {"places/effective": "effective"}
SPAN = 8  # rollouts that a point of a curve is the mean of
TESTS = (
    *(("merging", "P", "P8"), ("merging, with a cache", "C", "C8"), ("places", "P+", "P")),
    *(("places, with a cache", "C+", "C"), ("stale keys", "P+", "C+"), ("weights", "C+w", "C+"), ("jumps", "G", "P+")),
)
Lines = Sequence[Mapping[str, Any]]


def collapsed(line: Mapping[str, Any]) -> bool:
    return bool(line["error"]) or accuracy(line["right"]) < LEAST


def interval(values: Sequence[float]) -> str:
    """A mean with its 95% t-interval over models."""
    mean = fmean(values)
    if len(values) < 2:
        return f"{mean:.3g}"
    half = stats.t.ppf(0.975, len(values) - 1) * stats.sem(values)
    return f"{mean:.3g} [{mean - half:.3g}, {mean + half:.3g}]"


def untrained(lines: Lines) -> str:
    by = {name: [line for line in lines if line["sampler"] == name] for name in SAMPLERS}
    by = {name: own for name, own in by.items() if own}
    if not by:
        return ""
    head = ["", *by]
    plain = ["places_nll", "tokens_nll", "log_weight", "effective", "no_support", "views"]
    rows = [[name, *(interval([line[name] for line in own]) for own in by.values())] for name in plain]
    first = next(iter(by.values()))[0]
    for name in (name for name, value in first.items() if isinstance(value, dict) and "cosine" in value):
        for what in ("cosine", "norm"):
            each = (interval([line[name][what] for line in own]) for own in by.values())
            rows.append([f"{name}: {what}", *each])
    return markdown_table(head, rows)


def curve(line: Mapping[str, Any], name: str) -> np.ndarray:
    """(rollouts,) what a run logged as `name`. A rollout whose prompts are all dropped has no trajectories: nan."""
    given = np.array(line["series"][name])
    if not name.startswith("places/"):
        return given
    counts = np.array(line["series"]["places/tokens_nll"]) != 0
    values = np.full(len(counts), np.nan)
    values[counts] = given if len(given) == counts.sum() else given[counts]
    return values


def early(line: Mapping[str, Any], name: str) -> float:
    mean = float(np.nanmean(curve(line, f"places/{name}")[:FIRST]))
    return 1 - mean if name == "effective" else mean


def of_logs(lines: Lines) -> str:
    """Whether metrics of the first rollouts are larger in runs that collapsed."""
    bad, good = ([line for line in lines if collapsed(line) == is_bad] for is_bad in (True, False))
    if not bad or not good:
        return f"{len(bad)} of {len(lines)} runs collapsed: there is nothing to compare.\n"
    names = ("nll", "impossible", "effective")
    values = {name: [[early(line, name) for line in group] for group in (bad, good)] for name in names}
    p_values = [stats.mannwhitneyu(*values[name], alternative="greater").pvalue for name in names]
    rows = [
        [name if name != "effective" else "1 - effective", *map(interval, values[name]), f"{p:.2g}"]
        for name, p in zip(names, holm(p_values), strict=True)
    ]
    head = [f"mean of the first {FIRST} rollouts", f"collapsed ({len(bad)})", f"others ({len(good)})", "p after Holm"]
    return markdown_table(head, rows)


def figure(lines: Lines, path: Path = FIGURE) -> None:
    """Plots what the runs of `logs` logged, with 95% t-intervals over the runs that collapsed, and over the others."""
    drawn, axes = panels(2, 2, size=(WIDTH, 5), share_x=True)
    for axis, (name, title) in zip(axes, CURVES.items(), strict=True):
        for is_bad, label in ((True, "collapsed"), (False, "others")):
            series = np.array([curve(line, name) for line in lines if collapsed(line) == is_bad])
            means = np.nanmean(series.reshape(len(series), -1, SPAN), 2)
            at = SPAN * (np.arange(means.shape[1]) + 0.5)
            half = stats.t.ppf(0.975, len(means) - 1) * stats.sem(means)
            (middle,) = axis.plot(at, means.mean(0), label=f"{label} ({len(means)})")
            low, high = means.mean(0) - half, means.mean(0) + half
            axis.fill_between(at, low, high, alpha=0.2, color=middle.get_color())
        axis.set_title(title)
    for axis in axes[2:]:
        axis.set_xlabel("rollout")
    legend(drawn)
    save_figure(drawn, path)


def by_arm(lines: Lines) -> dict[str, list[Mapping[str, Any]]]:
    """The lines of each arm that has some."""
    found = {arm: [line for line in lines if line["arm"] == arm] for arm in (*ARMS, BEST)}
    return {arm: own for arm, own in found.items() if own}


def table(lines: Lines, reference: Lines) -> str:
    """Accuracy, collapses and costs per arm; differences to exact rollouts are paired by seed and problem."""
    head = ["arm", "seeds", "solved, % [95%]", "minus exact [95%]", "collapsed [95%]", "updates", "tokens, M"]
    head += ["processor s", "seconds of the clock"]
    rows = []
    for arm, own in by_arm((*lines, *reference)).items():
        gap = gain(own, reference) if arm != "exact" else ""
        bad = sum(map(collapsed, own))
        numbers = [fmean(line[name] for line in own) for name in ("steps", "compute", "processor_seconds", "seconds")]
        costs = [f"{numbers[0]:.0f}", f"{numbers[1] / 1e6:.2f}", f"{numbers[2]:.1f}", f"{numbers[3]:.1f}"]
        many = f"{bad}: {percent(share(bad, len(own)))}%"
        rows.append([arm, str(len(own)), percent(mean_of(scores(own))), gap, many, *costs])
    return markdown_table(head, rows)


def verdicts(lines: Lines) -> str:
    """The registered tests, given once all runs are there, and what the first arm solves minus the second."""
    by = by_arm(lines)
    bad = {arm: sum(map(collapsed, own)) for arm, own in by.items()}
    p_values = [
        stats.fisher_exact([[bad[few], 20 - bad[few]], [bad[many], 20 - bad[many]]], alternative="less").pvalue
        for _, few, many in TESTS
    ]
    each = zip(TESTS, holm(p_values), strict=True)
    rows = [
        [what, f"{few}: {bad[few]}", f"{many}: {bad[many]}", f"{p:.2g}", gain(by[few], by[many])]
        for (what, few, many), p in each
    ]
    return markdown_table(["suspect", "fewer collapse in", "than in", "p after Holm", "in points [95%]"], rows)


def searched() -> str:
    """What each arm solves with each rate, in percent of the validation problems, and which one is `best`."""
    lines = read_lines(DATA / "rates.jsonl")
    arms = STAGES["rates"].arms
    rows = [[arm, *(f"{100 * mean_accuracy(arm, rate, lines):.1f}" for rate in RATES)] for arm in arms]
    arm, rate = setting_of("goal", {"arm": BEST})
    return f"{markdown_table(['arm', *map(str, RATES)], rows)}\n`{BEST}` is {arm} at {rate}.\n"


def contrasts(lines: Lines) -> str:
    """What the first arm of each registered test solves minus the second, without a test."""
    by = by_arm(lines)
    rows = [[what, few, many, gain(by[few], by[many])] for what, few, many in TESTS]
    return markdown_table(["suspect", "arm", "compared with", "in points [95%]"], rows)


def goal(lines: Lines, reference: Lines) -> str:
    """Which arms with at most one collapsed run are not worse than exact rollouts."""
    by = by_arm(lines)
    able = [arm for arm, own in by.items() if sum(map(collapsed, own)) <= 1]
    p_values = [p_above(scores(by[arm]) - scores(reference), -MARGIN) for arm in able]
    each = zip(able, holm([1.0 if p is None else p for p in p_values]), strict=True)
    goals = [f"`{arm}`: p {p:.2g}" for arm, p in each]
    said = ", ".join(goals) or "none"
    return f"Not worse than exact by 2 points, of the arms with at most one collapsed run: {said}.\n"


def parts() -> dict[Path, str]:
    """Page -> the part of it that is written."""
    found = {stage: read_lines(DATA / f"{stage}.jsonl") for stage in ("untrained", *STAGES)}
    planned = {"untrained": len(models())} | {stage: len(runs(stage)) for stage in STAGES}
    done = ", ".join(f"{len(lines)} of {planned[stage]} ({stage})" for stage, lines in found.items())
    complete = {stage for stage, lines in found.items() if len(lines) == planned[stage]}
    text = f"Runs that are done: {done}.\n"
    if found["untrained"]:
        text += f"\n### Untrained\n\n{untrained(found['untrained'])}"
    if "logs" in complete:
        text += f"\n### Logs of `prefix`\n\n{of_logs(found['logs'])}"
        text += f"\n![What runs that collapsed and the others logged, against rollouts]({FIGURE.name})\n"
    reference = found["reference"] if "reference" in complete else []
    lines = {"test": found["test"], "tokens": [*found["tokens"], *found["goal"]], "seconds": found["seconds"]}
    titles = {"test": "At equal rollouts", "tokens": "At equal tokens", "seconds": "At equal processor seconds"}
    for stage, title in titles.items():
        if lines[stage]:
            text += f"\n### {title}\n\n{table(lines[stage], reference)}"
        if stage in complete:
            text += f"\n{(verdicts if stage == 'test' else contrasts)(lines[stage])}"
        if stage == "tokens" and {"reference", "tokens", "goal"} <= complete:
            text += f"\n{goal(lines[stage], reference)}"
    if "rates" in complete:
        text += f"\n### Rates\n\n{searched()}"
    return {Path(__file__).with_name("README.md"): text}


def write_figure() -> None:
    """Writes the figure; nothing as long as runs are missing."""
    lines = read_lines(DATA / "logs.jsonl")
    if len(lines) == len(runs("logs")):
        figure(lines)
