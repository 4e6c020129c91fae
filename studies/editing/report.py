"""The tables of README.md, from the files in data/."""

from __future__ import annotations

import statistics
from itertools import product
from pathlib import Path
from typing import Any

from d1.show.tables import markdown_table
from studies.editing import search
from studies.editing.frontier import gains
from studies.editing.run import BASES, DATA
from studies.json_lines import read_lines
from studies.samplers.cost import with_margin

FIRST = DATA.with_name("first.jsonl")
HEAD = [
    "sampler",
    "model",
    "solved, %",
    "passes",
    "tokens per pass",
    "edits",
    "corrected",
    "spoiled",
    "against unedited",
]


def mean(values: list[float]) -> str:
    spread = f" ± {statistics.stdev(values):.1f}" if len(values) > 1 else ""
    return f"{statistics.fmean(values):.1f}{spread}"


def changed(runs: list[dict[str, Any]], before: str, after: str) -> str:
    """Per 100 completions, those whose drafts had one outcome and whose text has the other; all seeds together."""
    pairs = [pair for run in runs for pair in zip(run["drafts"], run["solved"], strict=True)]
    return f"{100 * pairs.count((before, after)) / len(pairs):.1f}"


def against(runs: list[dict[str, Any]], unedited: list[list[dict[str, Any]]]) -> str:
    """The mean of `gains` in points, with its 95% interval."""
    found = gains(runs, unedited)
    return "{:+.1f} ± {:.1f}".format(*with_margin(found)) if found else "none is as fast"


def searched(lines: list[dict[str, Any]]) -> str:
    """The table of the search: mean gains of each candidate, in points."""
    heads, rows = [*product(search.THRESHOLDS, BASES)], []
    for name in search.CANDIDATES:
        found = {at: search.points(lines, name, *at) for at in heads}
        if any(found.values()):
            rows.append([name, *("" if not of else f"{statistics.fmean(of):+.1f}" for of in found.values())])
    head = ["noise, share", *(f"{task}, above {threshold}" for threshold, task in heads)]
    return "## Search\n\n" + markdown_table(head, rows) if rows else ""


def table(title: str, task: str, lines: list[dict[str, Any]]) -> str:
    own = [line for line in lines if line["task"] == task]
    noises = list(dict.fromkeys(line["noise"] for line in own))
    samplers = list(dict.fromkeys(name for line in own for name in line["samplers"]))
    by_name = {
        (name, noise): [line["samplers"][name] for line in own if line["noise"] == noise and name in line["samplers"]]
        for name in samplers
        for noise in noises
    }
    by_name = {key: runs for key, runs in by_name.items() if runs}
    unedited = [runs for runs in by_name.values() if "edits" not in runs[0]]
    rows = []
    for (name, noise), runs in by_name.items():
        solved = mean([100 * run["solved"].count("1") / len(run["solved"]) for run in runs])
        cost = [f"{statistics.fmean(run['passes'] for run in runs):.2f}"]
        cost += [f"{statistics.fmean(run['tokens'] / run['passes'] for run in runs):.2f}"]
        edits = [""] * 4
        if "edits" in runs[0]:
            count = statistics.fmean(run["edits"] for run in runs)
            edits = [f"{count:.2f}", changed(runs, "0", "1"), changed(runs, "1", "0"), against(runs, unedited)]
        rows.append([name, noise, solved, *cost, *edits])
    seeds = len({line["seed"] for line in own})
    problems = len(own[0]["samplers"][samplers[0]]["solved"])
    return f"## {title}: {task}, {seeds} seeds, {problems} problems\n\n" + markdown_table(HEAD, rows)


def parts() -> dict[Path, str]:
    """Page -> the part of it that is written."""
    tables = [searched(read_lines(search.DATA))]
    for title, file in (("Run", DATA), ("First run", FIRST)):
        lines = read_lines(file)
        tables += [table(title, task, lines) for task in BASES if any(line["task"] == task for line in lines)]
    return {Path(__file__).with_name("README.md"): "\n".join(filter(None, tables))}
