"""The tables of README.md, from data/runs.jsonl."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np

from d1.runs.tables import markdown_table
from pocket.uncertainty import mean_of
from studies.json_lines import read_lines
from studies.reports import gain, percent, points, scores
from studies.tools.run import ARMS, BLOCKS, RUNS, SEEDS

HEADER = [
    "attention",
    "arm",
    "seeds",
    "solved",
    "tool minus this arm",
    "calls per problem",
    "solved with the calculator",
]
HEADER += ["updates", "processor s"]
SHARES = (0.0, 0.1, 0.25, 0.5, 1.0)  # of a run, for the calls over training
OVER_TIME = ["attention", "arm", *(f"at {share:.0%}" for share in SHARES), "seeds that rose"]


def row(attention: str, arm: str, lines: list[dict[str, Any]]) -> list[str]:
    """A row of the table: means over seeds. The SFT model, which has one seed, is compared with each."""
    own, tool = (
        [line for line in lines if (line["attention"], line["arm"]) == (attention, of)] for of in (arm, "tool")
    )
    less = "" if arm == "tool" else gain(tool, own)
    if arm == "sft" and tool:
        less = points(mean_of(scores(tool) - scores(own)))
    other = (
        ""
        if arm in ("sft", "tool")
        else percent(mean_of(scores({**line, "right": line["right_with_tool"]} for line in own)))
    )
    calls, seconds = (np.mean([line[name] for line in own]) for name in ("calls", "seconds"))
    steps = [line["steps"] for line in own if "steps" in line]
    updates = f"{min(steps)} to {max(steps)}" if steps else ""
    solved = percent(mean_of(scores(own)))
    return [attention, arm, str(len(own)), solved, less, f"{calls:.2f}", other, updates, f"{seconds:.0f}"]


def over_time(attention: str, arm: str, lines: list[dict[str, Any]]) -> list[str]:
    """Calls per episode in training: the smallest and the largest of the seeds; and in how many they rose, from the
    first rollout to the last."""
    curves = [
        line["curves"]["tools/call_frequency"] for line in lines if (line["attention"], line["arm"]) == (attention, arm)
    ]
    cells = []
    for share in SHARES:
        found = [curve[round(share * (len(curve) - 1))] for curve in curves]
        cells.append(f"{min(found):.2f} to {max(found):.2f}")
    return [attention, arm, *cells, f"{sum(curve[-1] > curve[0] for curve in curves)} of {len(curves)}"]


def table(lines: list[dict[str, Any]]) -> str:
    there = {(line["attention"], line["arm"]) for line in lines}
    pairs = [(attention, arm) for attention in BLOCKS for arm in ARMS if (attention, arm) in there]
    planned = len(BLOCKS) * (1 + (len(ARMS) - 1) * len(SEEDS))
    told = f"{len(lines)} of {planned} planned runs are done."
    if not pairs:
        return f"{told}\n"
    trained = [pair for pair in pairs if pair[1] in ("random", "tool")]
    both = [(HEADER, [row(*pair, lines) for pair in pairs]), (OVER_TIME, [over_time(*pair, lines) for pair in trained])]
    return "\n".join([f"{told}\n", *(markdown_table(header, rows) for header, rows in both)])


def parts() -> dict[Path, str]:
    """Page -> the part of it that is written."""
    return {Path(__file__).with_name("README.md"): table(read_lines(RUNS))}
