"""The tables of docs/distill.md and README.md, from data/runs.jsonl."""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from d1.runs.tables import markdown_table
from pocket.recipes import ROOT
from pocket.uncertainty import mean_of
from studies.distill.run import (
    CACHED,
    EXACT,
    GOAL,
    MARGIN,
    METHODS,
    RUNS,
    UNDISTILLED,
    Line,
    chosen,
    mean_over,
)
from studies.distill.teachers import SEEDS, TASKS
from studies.json_lines import read_lines
from studies.reports import percent
from studies.reports import points as in_points
from studies.samplers.measure import aup, outcomes, points

OF_GOAL = ["task", "candidate", "best undistilled sampler", "solved, % [95%]", "minus that sampler [95%]"]
OF_GOAL += ["minus exact [95%]", "passes", "times fewer passes", "times fewer tokens than exact"]


def uncached(samplers: Mapping[str, Any]) -> dict[str, Any]:
    """The samplers without a cache, whose points AUP is taken of."""
    return {name: found for name, found in samplers.items() if not name.startswith(CACHED)}


def cost(lines: Sequence[Line], name: str) -> tuple[float, float, float]:
    """Passes, tokens per pass, and computed tokens, per problem."""
    passes, tokens, computed = (mean_over(lines, "test", name, value) for value in ("passes", "tokens", "computed"))
    return passes, tokens / passes, computed


def summary(task: str, lines: Sequence[Line]) -> list[list[str]]:
    """The rows of the table for one task."""
    by_method = {method: [line for line in lines if line["method"] == method] for method in METHODS}
    by_method = {method: found for method, found in by_method.items() if found}
    start = by_method[UNDISTILLED]
    highest = max(y for line in lines for _, y in points(uncached(line["test"])))
    exact = cost(start, EXACT)
    rows = []
    for method, found in [("exact", start), *by_method.items()]:
        seeds = [line["seed"] for line in found]
        paired = [line for line in start if line["seed"] in seeds]
        least = mean_over(paired, "validation", EXACT, "accuracy") - MARGIN
        name = EXACT if method == "exact" else chosen(found, least)
        passes, per_pass, computed = cost(found, name)
        own = outcomes(line["test"][name] for line in found)
        difference = own - outcomes(line["test"][EXACT] for line in paired)
        gain = "" if method == "exact" else in_points(mean_of(difference))
        areas = [aup(uncached(line["test"]), highest) for line in found]
        spread = f" ± {statistics.stdev(areas):.0f}" if len(areas) > 1 else ""
        area = "" if method == "exact" else f"{statistics.fmean(areas):.0f}{spread}"
        shown = "undistilled" if method == "exact" else method
        cells = [percent(mean_of(own)), gain, f"{passes:.2f}", f"{per_pass:.1f}", f"{exact[2] / computed:.1f}"]
        rows.append([task, shown, str(len(seeds)), area, name, *cells])
    return rows


def goal(task: str) -> list[list[str]]:
    """The row of the candidate for the goal, on problems of its own; none before it was tried with all seeds."""
    lines = [line for line in read_lines(GOAL) if line["task"] == task]
    if len(lines) < len(SEEDS):
        return []
    slow, name = lines[0]["slow"], lines[0]["name"]
    own, before, exact = (
        [line[model][sampler] for line in lines]
        for model, sampler in (("distilled", name), (UNDISTILLED, slow), (UNDISTILLED, EXACT))
    )
    passes, slowest = (statistics.fmean(one["passes"] for one in of) for of in (own, before))
    tokens, most = (statistics.fmean(one["computed"] for one in of) for of in (own, exact))
    gains = [in_points(mean_of(outcomes(own) - outcomes(of))) for of in (before, exact)]
    cells = [task, f"{lines[0]['method']}, {name}", slow, percent(mean_of(outcomes(own))), *gains]
    return [[*cells, f"{passes:.2f}", f"{slowest / passes:.2f}", f"{most / tokens:.1f}"]]


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


def by_model(rows: Sequence[Sequence[str]]) -> str:
    """The page's table: a line per model, with the chosen samplers' costs on each task."""
    gains = {(task, model): [gain, passes, fewer] for task, model, *_, gain, passes, _, fewer in rows if gain}
    lines = [[model, *(cell for task in TASKS for cell in gains.get((task, model), [""] * 3))] for model in METHODS]
    names = ("minus exact [95%]", "passes", "fewer")
    return markdown_table(["model", *(f"{task}: {name}" for task in TASKS for name in names)], lines)


def parts() -> dict[Path, str]:
    """Page -> the part of it that is written."""
    lines, rows, goals, frontiers = read_lines(RUNS), [], [], []
    for task in TASKS:
        own = sorted((line for line in lines if line["task"] == task), key=lambda line: line["seed"])
        if any(line["method"] == UNDISTILLED for line in own):
            rows += summary(task, own)
            goals += goal(task)
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
    result = markdown_table(head, rows)
    models = len(TASKS) * len(SEEDS) * len(METHODS)
    if len(lines) < models:
        result += f"\nThis table is incomplete: {len(lines)} of {models} models are measured. "
        result += "`python -m studies.distill.run` continues.\n"
    readme = Path(__file__).with_name("README.md")
    candidates = f"## The candidates for the goal\n\n{markdown_table(OF_GOAL, goals)}"
    tables = "\n".join([f"## The chosen samplers\n\n{result}", candidates, *frontiers])
    return {ROOT / "docs" / "distill.md": by_model(rows), readme: tables}
