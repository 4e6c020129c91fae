"""The leaderboard's data: one JSON line per run in `data/`, read without the sealed outcomes."""

from __future__ import annotations

import json
from dataclasses import fields
from pathlib import Path
from typing import Any

from d1.rl.methods import METHODS
from pocket.recipes import ROOT
from studies.json_lines import read_lines
from studies.leaderboard.plan import Run
from studies.leaderboard.variants import row_of, values_of

DATA = ROOT / "studies" / "leaderboard" / "data"
Line = dict[str, Any]


def file_of(data: Path, run: Run) -> Path:
    return data / f"{run.stage}.jsonl"


def read_results(data: Path = DATA, final_table: bool = False) -> dict[Run, Line]:
    """The line of each run, without its outcomes on sealed problems; the last line if a run has several.

    Lines of a method or variant whose values have changed since are left out. Only the final table reads the outcomes
    on sealed problems (`final_table`).
    """
    found = {}
    for file in sorted(data.glob("*.jsonl")):
        for line in read_lines(file):
            if not final_table:
                line.pop("sealed", None)
            if line["values"] == written_values(line["method"]):
                found[Run(**{field.name: line[field.name] for field in fields(Run)})] = line
    return found


def written_values(method: str) -> dict[str, Any] | None:
    """The values of a row or variant, converted as in JSON; None for a start model or a row that no longer exists."""
    return json.loads(json.dumps(values_of(method))) if row_of(method) in METHODS else None
