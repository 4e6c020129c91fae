"""The tables of README.md, from the files in data/."""

from __future__ import annotations

import statistics
from itertools import chain, product
from pathlib import Path
from typing import Any

import numpy as np

from d1.show.tables import markdown_table
from pocket.uncertainty import mean_of
from studies.editing import search
from studies.editing.run import BASES, DATA
from studies.editing.search import Runs, gains, passes
from studies.json_lines import read_lines
from studies.reports import points

FIRST = DATA.with_name("first.jsonl")
MASKS = "masks"  # the SFT without noise
HEAD = [
    "sampler",
    "model",
    "solved, %",
    "passes",
    "tokens per pass",
    "edits",
    "corrected",
    "spoiled",
    "against masks",
    "against unedited",
    "against its own",
]


def mean(values: list[float]) -> str:
    spread = f" ± {statistics.stdev(values):.1f}" if len(values) > 1 else ""
    return f"{statistics.fmean(values):.1f}{spread}"


def changed(runs: Runs, before: str, after: str) -> str:
    """Per 100 completions, those whose drafts had one outcome and whose text has the other; all seeds together."""
    pairs = [pair for run in runs.values() for pair in zip(run["drafts"], run["solved"], strict=True)]
    return f"{100 * pairs.count((before, after)) / len(pairs):.1f}"


def against(runs: Runs, unedited: list[Runs]) -> str:
    """The mean of `gains` in points, with its 95% interval over seeds and problems."""
    found = gains(runs, unedited)
    return points(mean_of(found)) if found.size else "none is as fast"


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
    by_name: dict[tuple[str, str], Runs] = {}
    for name, noise, line in product(samplers, noises, own):
        if line["noise"] == noise and name in line["samplers"]:
            by_name.setdefault((name, noise), {})[line["seed"]] = line["samplers"][name]
    unedited = {noise: [runs for (_, of), runs in by_name.items() if of == noise] for noise in noises}
    unedited = {noise: [runs for runs in of if not edited(runs)] for noise, of in unedited.items()}
    rows = []
    for (name, noise), runs in by_name.items():
        solved = mean([100 * run["solved"].count("1") / len(run["solved"]) for run in runs.values()])
        cost = [
            f"{passes(runs):.2f}",
            f"{statistics.fmean(run['tokens'] / run['passes'] for run in runs.values()):.2f}",
        ]
        edits = [""] * 6
        if not edited(runs) and noise != MASKS and (masks := by_name.get((name, MASKS))):
            edits[3] = points(mean_of(solved_by(runs, masks) - solved_by(masks, runs)))
        if edited(runs):
            count = statistics.fmean(run["edits"] for run in runs.values())
            edits = [f"{count:.2f}", changed(runs, "0", "1"), changed(runs, "1", "0"), ""]
            edits += [against(runs, [*chain(*unedited.values())]), against(runs, unedited[noise])]
        rows.append([name, noise, solved, *cost, *edits])
    seeds = len({line["seed"] for line in own})
    problems = len(own[0]["samplers"][samplers[0]]["solved"])
    return f"## {title}: {task}, {seeds} seed{'s' * (seeds > 1)}, {problems} problems\n\n" + markdown_table(HEAD, rows)


def solved_by(runs: Runs, others: Runs) -> np.ndarray:
    """(seeds, problems) of 0 and 1, of the seeds that `others` has, too."""
    return np.array([[*map(float, runs[seed]["solved"])] for seed in sorted(runs.keys() & others.keys())])


def edited(runs: Runs) -> bool:
    return any("edits" in run for run in runs.values())


def parts() -> dict[Path, str]:
    """Page -> the part of it that is written."""
    tables, lines = [searched(read_lines(search.DATA))], read_lines(DATA)
    epochs = sorted({line["epochs"] for line in lines}, reverse=True)
    runs = {f"Run, epochs {of}": [line for line in lines if line["epochs"] == of] for of in epochs}
    for title, found in (runs | {"First run": read_lines(FIRST)}).items():
        tables += [table(title, task, found) for task in BASES if any(line["task"] == task for line in found)]
    return {Path(__file__).with_name("README.md"): "\n".join(filter(None, tables))}
