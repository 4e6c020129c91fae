"""The tables of docs/preference.md and README.md, from data/runs.jsonl."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np

from d1.show.tables import markdown_table
from pocket.recipes import ROOT
from pocket.uncertainty import mean_of
from studies.json_lines import read_lines
from studies.preference.run import ARMS, DATA
from studies.reports import gain, percent, scores

CHOSEN = 3e-5  # learning rate
NAMES = {"sft": "SFT, where all others start", "vrpo": "VRPO", "elbo-kto": "ELBO-KTO", "diffu-grpo": "diffu-GRPO"}


def against(found: list[dict[str, Any]], arm: str, here: list[dict[str, Any]]) -> str:
    """The gain over another arm; empty for this arm itself."""
    return "" if found[0]["arm"] == arm else gain(found, [line for line in here if line["arm"] == arm])


def table() -> str:
    """Accuracy by task and arm, and its gain over SFT and over diffu-GRPO."""
    lines, rows = read_lines(DATA / "runs.jsonl"), []
    for task in dict.fromkeys(line["task"] for line in lines):
        here = [line for line in lines if line["task"] == task]
        for arm, rate in sorted(
            {(line["arm"], line["rate"]) for line in here}, key=lambda one: (ARMS.index(one[0]), one[1])
        ):
            found = [line for line in here if (line["arm"], line["rate"]) == (arm, rate)]
            name = NAMES[arm] if rate is None else f"{NAMES[arm]}, learning rate {rate:g}"
            gains = against(found, "sft", here), "" if arm == "sft" else against(found, "diffu-grpo", here)
            million = np.mean([line["compute"] for line in found]) / 1e6
            rows.append([task, name, str(len(found)), percent(mean_of(scores(found))), *gains, f"{million:.2f}"])
    header = ["task", "training", "seeds", "solved, % [95%]", "minus SFT [95%]", "minus diffu-GRPO [95%]"]
    return markdown_table([*header, "million compute tokens"], rows)


def summary() -> str:
    """The page's table: each arm's gain over SFT, at the rate that the search chose, by task."""
    lines = read_lines(DATA / "runs.jsonl")
    tasks = list(dict.fromkeys(line["task"] for line in lines))
    rows = []
    for arm in ARMS[1:]:
        cells = []
        for task in tasks:
            here = [line for line in lines if line["task"] == task]
            found = [line for line in here if line["arm"] == arm and line["rate"] in (None, CHOSEN)]
            cells.append(against(found, "sft", here))
        rows.append([NAMES[arm], *cells])
    return markdown_table(["minus SFT, points [95%]", *tasks], rows)


def parts() -> dict[Path, str]:
    """Page -> the part of it that is written."""
    return {ROOT / "docs" / "preference.md": summary(), Path(__file__).with_name("README.md"): table()}
