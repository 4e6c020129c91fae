"""The tables of docs/distill.md and README.md, from data/runs.jsonl."""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from d1.show.tables import markdown_table
from pocket.recipes import ROOT
from pocket.uncertainty import mean_of
from studies.distill.choice import chosen, mean_over
from studies.distill.run import CACHED, DATA, EXACT, METHODS, UNDISTILLED
from studies.distill.teachers import SEEDS, TASKS
from studies.json_lines import read_lines
from studies.leaderboard.statistics import percent
from studies.leaderboard.statistics import points as in_points
from studies.samplers.points import aup, points

MARGIN = 1.0  # points of accuracy below the undistilled exact sampler
Line = Mapping[str, Any]


def uncached(samplers: Mapping[str, Any]) -> dict[str, Any]:
    """The samplers without a cache, whose points AUP is taken of."""
    return {name: found for name, found in samplers.items() if not name.startswith(CACHED)}


def outcomes(lines: Sequence[Line], name: str) -> np.ndarray:
    """(seeds, problems), 1 where a problem is solved."""
    return np.array([[float(one) for one in line["test"][name]["solved"]] for line in lines])


def cost(lines: Sequence[Line], name: str) -> tuple[float, float, float]:
    """Passes, tokens per pass, and computed tokens, per problem."""
    passes, tokens, computed = (mean_over(lines, "test", name, value) for value in ("passes", "tokens", "computed"))
    return passes, tokens / passes, computed


def summary(task: str, lines: Sequence[Line]) -> tuple[list[list[str]], str]:
    """The rows of the table for one task, and a sentence about the goal."""
    by_method = {method: [line for line in lines if line["method"] == method] for method in METHODS}
    by_method = {method: found for method, found in by_method.items() if found}
    start = by_method[UNDISTILLED]
    highest = max(y for line in lines for _, y in points(uncached(line["test"])))
    exact = cost(start, EXACT)
    rows, judged = [], {}
    for method, found in [("exact", start), *by_method.items()]:
        seeds = [line["seed"] for line in found]
        paired = [line for line in start if line["seed"] in seeds]
        least = mean_over(paired, "validation", EXACT, "accuracy") - MARGIN
        name = EXACT if method == "exact" else chosen(found, least)
        passes, per_pass, computed = cost(found, name)
        own = outcomes(found, name)
        difference = own - outcomes(paired, EXACT)
        gain = "" if method == "exact" else in_points(mean_of(difference))
        areas = [aup(uncached(line["test"]), highest) for line in found]
        spread = f" ± {statistics.stdev(areas):.0f}" if len(areas) > 1 else ""
        area = "" if method == "exact" else f"{statistics.fmean(areas):.0f}{spread}"
        shown = "undistilled" if method == "exact" else method
        cells = [percent(mean_of(own)), gain, f"{passes:.2f}", f"{per_pass:.1f}", f"{exact[2] / computed:.1f}"]
        rows.append([task, shown, str(len(seeds)), area, name, *cells])
        judged[method] = (found, paired, name, passes, exact[2] / computed)
    least = mean_over(start, "validation", EXACT, "accuracy") - MARGIN
    return rows, verdict(task, judged, chosen(start, least, "passes"))


def verdict(task: str, judged: Mapping[str, Any], slow: str) -> str:
    """Whether a distilled model reached the goal: of those that did, or else of all, the one that computes the fewest
    tokens. `slow`: the undistilled sampler with the fewest passes."""
    before, found = cost(judged[UNDISTILLED][0], slow)[0], []
    for method in METHODS[1:]:
        if method in judged:
            own, paired, name, passes, fewer = judged[method]
            difference = mean_of(outcomes(own, name) - outcomes(paired, slow))
            reached = passes <= before / 2 and difference.low >= -MARGIN / 100 and fewer >= 10
            found.append((not reached, -fewer, method, name, passes, difference))
    if not found:
        return ""
    missed, fewer, method, name, passes, difference = min(found, key=lambda one: one[:2])
    takes = f"{passes:.2f} passes, {before / passes:.2f} times fewer than the best undistilled sampler"
    return (
        f"{task.capitalize()}: {method} ({name}) takes {takes} ({slow}, {before:.2f}), at {in_points(difference)} "
        f"points of accuracy, and computes {-fewer:.1f} times fewer tokens than the exact sampler. The goal is "
        f"{'not reached' if missed else 'reached'}.\n"
    )


def frontier(task: str, lines: Sequence[Line]) -> str:
    """Every sampler of every model, the mean of the seeds on test problems."""
    rows = []
    for method in METHODS:
        found = [line for line in lines if line["method"] == method]
        for name in found[0]["test"] if found else ():
            passes, per_pass, computed = cost(found, name)
            solved = mean_over(found, "test", name, "accuracy")
            rows.append([method, name, f"{solved:.1f}", f"{passes:.2f}", f"{per_pass:.1f}", f"{computed:.0f}"])
    head = ["model", "sampler", "solved, %", "passes", "tokens per pass", "computed tokens"]
    return f"## {task}, every sampler\n\n{markdown_table(head, rows)}"


def parts() -> dict[Path, str]:
    """Page -> the part of it that is written."""
    lines, rows, verdicts, frontiers = read_lines(DATA / "runs.jsonl"), [], [], []
    for task in TASKS:
        own = sorted((line for line in lines if line["task"] == task), key=lambda line: line["seed"])
        if any(line["method"] == UNDISTILLED for line in own):
            table, sentence = summary(task, own)
            rows += table
            verdicts.append(sentence)
            frontiers.append(frontier(task, own))
    head = [
        "task",
        "model",
        "seeds",
        "AUP",
        "sampler",
        "solved, % [95%]",
        "minus exact [95%]",
        "passes",
        "TPF",
        "fewer",
    ]
    result = markdown_table(head, rows) + "\n" + "\n".join(verdicts)
    models = len(TASKS) * len(SEEDS) * len(METHODS)
    if len(lines) < models:
        result += f"\nThis table is incomplete: {len(lines)} of {models} models are measured. "
        result += "`python -m studies.distill.run` continues.\n"
    readme = Path(__file__).with_name("README.md")
    return {ROOT / "docs" / "distill.md": result, readme: "\n".join(frontiers)}
