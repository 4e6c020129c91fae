"""The tables of README.md, from data/*.jsonl."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from statistics import fmean
from typing import Any

import numpy as np
from scipy import stats
from scipy.stats import binomtest

from d1.runs.tables import markdown_table
from pocket.uncertainty import Mean, mean_of
from studies.collapse.run import DATA, FAST, STAGES, START, THIRD, runs
from studies.json_lines import read_lines
from studies.reports import Interval, gain, holm, p_above, percent, points, scores
from studies.training import accuracy

LIMIT = 0.806  # 8 points below exact rollouts in an earlier study; a run that solves less is "below the limit"
MARGIN = 0.02
TESTS = (
    ("merging", "P", "P8"),
    ("merging, with a cache", "C", "C8"),
    ("places", "P+", "P"),
    ("places, with a cache", "C+", "C"),
    ("stale keys", "P+", "C+"),
    ("weights", "C+w", "C+"),
    ("jumps", "G", "P+"),
)
# The eight cells at a third of the tokens: rollouts, steps per view, loss over a completion.
CELLS: dict[tuple[str, str, str], str] = {
    ("exact", "merged", "mean"): "E8-mean",
    ("exact", "merged", "sum"): "E8-sum",
    ("exact", "single", "mean"): "E1-mean",
    ("exact", "single", "sum"): "E1-sum",
    ("fast", "merged", "mean"): "P8",
    ("fast", "merged", "sum"): "P8-sum",
    ("fast", "single", "mean"): "P1-mean",
    ("fast", "single", "sum"): "P",
}
FACTORS = {
    "rollouts: fast, not exact": "fast",
    "views: single steps, not merged": "single",
    "loss: sum, not mean": "sum",
}
IN_TOKENS = ("P8", "P", "C8", "C")  # arms of the stage `tokens` that are compared with the new ones
Line = Mapping[str, Any]
Lines = Sequence[Line]


def below_limit(line: Line) -> bool:
    return bool(line["error"]) or accuracy(line["right"]) < LIMIT


def share(count: int, of: int) -> Interval:
    """A share with its interval by Clopper and Pearson (1934)."""
    found = binomtest(count, of).proportion_ci(0.95, method="exact")
    return Interval(count / of, float(found.low), float(found.high))


def by_arm(lines: Lines) -> dict[str, list[Line]]:
    """The lines of each arm that has some, in the order of the arms."""
    found = {arm: [line for line in lines if line["arm"] == arm] for arm in (START, "exact", *FAST, *THIRD)}
    return {arm: own for arm, own in found.items() if own}


def table(lines: Lines, reference: Lines) -> str:
    """Accuracy, runs below the limit and costs per arm; differences to exact are paired by seed and problem."""
    head = ["arm", "seeds", "solved, % [95%]", "minus exact [95%]", "below the limit [95%]", "updates", "tokens, M"]
    head += ["processor s"]
    rows = []
    for arm, own in by_arm((*lines, *reference)).items():
        gap = gain(own, reference) if arm != "exact" else ""
        bad = sum(map(below_limit, own))
        costs = ["0", "", ""]
        if arm != START:
            numbers = [fmean(line[name] for line in own) for name in ("steps", "compute", "processor_seconds")]
            costs = [f"{numbers[0]:.0f}", f"{numbers[1] / 1e6:.2f}", f"{numbers[2]:.1f}"]
        many = f"{bad}: {percent(share(bad, len(own)))}%"
        rows.append([arm, str(len(own)), percent(mean_of(scores(own))), gap, many, *costs])
    return markdown_table(head, rows)


def verdicts(lines: Lines) -> str:
    """The registered tests of the stage `test`, and what the first arm solves minus the second."""
    by = by_arm(lines)
    bad = {arm: sum(map(below_limit, own)) for arm, own in by.items()}
    p_values = [
        stats.fisher_exact([[bad[few], 20 - bad[few]], [bad[many], 20 - bad[many]]], alternative="less").pvalue
        for _, few, many in TESTS
    ]
    rows = []
    for (what, few, many), p in zip(TESTS, holm(p_values), strict=True):
        rows.append([what, f"{few}: {bad[few]}", f"{many}: {bad[many]}", f"{p:.2g}", gain(by[few], by[many])])
    return markdown_table(["suspect", "fewer below the limit in", "than in", "p after Holm", "in points [95%]"], rows)


def cells_of(lines: Lines) -> dict[tuple[str, str, str], np.ndarray]:
    """The scores (seeds, problems) of each of the eight cells."""
    by = by_arm(lines)
    return {cell: scores(by[arm]) for cell, arm in CELLS.items()}


def effects(cells: Mapping[tuple[str, str, str], np.ndarray]) -> dict[str, Mean]:
    """The contrasts with intervals over seeds and problems."""
    return {name: mean_of(table) for name, table in contrasts(cells).items()}


def contrasts(cells: Mapping[tuple[str, str, str], np.ndarray]) -> dict[str, np.ndarray]:
    """Main effects of the three factors, and interactions of two: half of what the second adds to the first one's
    effect (PROTOCOL.md, step 7). (seeds, problems) each."""
    signs = {name: {cell: 1 if level in cell else -1 for cell in cells} for name, level in FACTORS.items()}
    found = {}
    for name, sign in signs.items():
        found[name] = 2 * np.mean([sign[cell] * table for cell, table in cells.items()], axis=0)
    names = [*FACTORS]
    for first in range(len(names)):
        for second in range(first + 1, len(names)):
            a, b = names[first], names[second]
            mean = np.mean([signs[a][cell] * signs[b][cell] * table for cell, table in cells.items()], axis=0)
            found[f"{a.partition(':')[0]} x {b.partition(':')[0]}"] = 2 * mean
    return found


def effect_table(lines: Lines) -> str:
    """The effects with intervals over seeds and problems, and the registered test: paired t over the seeds."""
    found = contrasts(cells_of(lines))
    adjusted = holm([float(stats.ttest_1samp(table.mean(1), 0).pvalue) for table in found.values()])
    rows = []
    for (name, table), p in zip(found.items(), adjusted, strict=True):
        rows.append(
            [name, points(mean_of(table)), np.format_float_positional(p, precision=2, fractional=False, trim="-")]
        )
    return markdown_table(["effect", "points [95%]", "p after Holm"], rows)


def fast_minus_exact(lines: Lines) -> str:
    """What fast rollouts solve minus exact ones with the same flags, at the same tokens."""
    by = by_arm(lines)
    rows = []
    for (rollouts, steps, loss), arm in CELLS.items():
        if rollouts == "fast":
            exact = CELLS["exact", steps, loss]
            rows.append([f"{steps} steps, {loss}", arm, exact, gain(by[arm], by[exact])])
    return markdown_table(["flags", "fast", "exact", "in points [95%]"], rows)


def goal(lines: Lines, reference: Lines) -> str:
    """Which arms with at most one run below the limit are not worse than exact rollouts with all tokens."""
    by = by_arm(lines)
    able = [arm for arm, own in by.items() if sum(map(below_limit, own)) <= 1]
    p_values = [p_above(scores(by[arm]) - scores(reference), -MARGIN) for arm in able]
    each = zip(able, holm([1.0 if p is None else p for p in p_values]), strict=True)
    said = ", ".join(f"`{arm}`: p {p:.2g}" for arm, p in each) or "none"
    return f"Not worse than exact by 2 points, of the arms with at most one run below the limit: {said}.\n"


def third_lines() -> list[dict[str, Any]]:
    """All lines at a third of the tokens: the new arms, and those of the stage `tokens` that they are compared with."""
    old = [line for line in read_lines(DATA / "tokens.jsonl") if line["arm"] in IN_TOKENS]
    return [*old, *read_lines(DATA / "third.jsonl")]


def left_out_lines() -> list[dict[str, Any]]:
    """The lines of the other arms of the stage `tokens`."""
    return [line for line in read_lines(DATA / "tokens.jsonl") if line["arm"] not in IN_TOKENS]


def parts() -> dict[Path, str]:
    """Page -> the part of it that is written."""
    found = {stage: read_lines(DATA / f"{stage}.jsonl") for stage in STAGES}
    done = ", ".join(f"{len(lines)} of {len(runs(stage))} ({stage})" for stage, lines in found.items())
    complete = {stage for stage, lines in found.items() if len(lines) == len(runs(stage))}
    text = f"Runs that are done: {done}.\n"
    reference = found["reference"] if "reference" in complete else []
    text += f"\n### At equal rollouts\n\n{table([*found[START], *found['test']], reference)}"
    if "test" in complete:
        text += f"\n{verdicts(found['test'])}"
    lines = third_lines()
    text += f"\n### At a third of the tokens\n\n{table(lines, reference)}"
    text += f"\n### At a third of the tokens, other arms of step 4\n\n{table(left_out_lines(), reference)}"
    if {"reference", "tokens", "third"} <= complete:
        text += f"\n### Fast minus exact rollouts at the same tokens\n\n{fast_minus_exact(lines)}"
        text += f"\n### Effects at a third of the tokens\n\n{effect_table(lines)}"
        text += f"\n{goal(lines, reference)}"
    return {Path(__file__).with_name("README.md"): text}
