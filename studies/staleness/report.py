"""The table of README.md, from data/runs.jsonl."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np

from d1.show.tables import markdown_table
from pocket.uncertainty import mean_of
from studies.json_lines import read_lines
from studies.reports import gain, percent, scores
from studies.staleness.run import ARMS, DATA, RATE, SEEDS, free_seconds

HEADER = ["task", "arm", "seeds", "solved", "difference to in turn", "rollouts", "seconds on two free cores"]
HEADER += ["trainer, processor s", "server, processor s", "seconds of the clock here"]


def seconds_of(line: dict[str, Any]) -> float:
    arm = ARMS[line["arm"]]
    return free_seconds(line["trainer_seconds"], line["server_seconds"], arm.rollouts, arm.staleness)


def row(task: str, arm: str, lines: list[dict[str, Any]]) -> list[str]:
    """A row of the table: means over seeds."""
    own, turn = ([line for line in lines if (line["task"], line["arm"]) == (task, of)] for of in (arm, "in turn"))
    more = "" if arm == "in turn" else gain(own, turn)
    seconds = [f"{np.mean([line[f'{name}_seconds'] for line in own]):.0f}" for name in ("trainer", "server", "clock")]
    return [
        *(task, arm, str(len(own)), percent(mean_of(scores(own))), more, str(ARMS[arm].rollouts)),
        *(f"{np.mean([seconds_of(line) for line in own]):.1f}", *seconds),
    ]


def table(lines: list[dict[str, Any]]) -> str:
    there = {(line["task"], line["arm"]) for line in lines}
    rows = [row(task, arm, lines) for task in RATE for arm in ARMS if (task, arm) in there]
    planned = len(RATE) * len(SEEDS) * len(ARMS)
    told = f"{len(lines)} of {planned} planned runs are done."
    return f"{told}\n\n{markdown_table(HEADER, rows)}" if rows else f"{told}\n"


def parts() -> dict[Path, str]:
    """Page -> the part of it that is written."""
    return {Path(__file__).with_name("README.md"): table(read_lines(DATA / "runs.jsonl"))}
