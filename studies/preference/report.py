"""The table of docs/preference.md, from data/runs.jsonl: python -m studies.preference.report"""

from __future__ import annotations

import argparse
import sys
from typing import Any

import numpy as np

from d1.show.tables import markdown_table
from pocket.uncertainty import mean_of
from studies.json_lines import read_lines
from studies.preference.run import ARMS, DATA

NAMES = {"sft": "SFT, where all others start", "vrpo": "VRPO", "elbo-kto": "ELBO-KTO", "diffu-grpo": "diffu-GRPO"}


def scores(lines: list[dict[str, Any]]) -> np.ndarray:
    """(seeds, problems), 1 where a problem is solved."""
    by_seed = sorted(lines, key=lambda line: line["seed"])
    return np.array([[float(one) for one in line["right"]] for line in by_seed])


def table() -> str:
    """Accuracy by task and arm; the gain over SFT of the same seeds, with its 95% interval over seeds and problems."""
    lines, rows = read_lines(DATA / "runs.jsonl"), []
    for task in dict.fromkeys(line["task"] for line in lines):
        found = {arm: [one for one in lines if (one["task"], one["arm"]) == (task, arm)] for arm in ARMS}
        for arm in (arm for arm in ARMS if found[arm]):
            seeds = {line["seed"] for line in found[arm]}
            start = scores([line for line in found["sft"] if line["seed"] in seeds])
            own = scores(found[arm])
            gain = mean_of(own - start)
            shown = "" if arm == "sft" else f"{gain.value:+.1%} [{gain.low:+.1%}, {gain.high:+.1%}]"
            million = np.mean([line["compute"] for line in found[arm]]) / 1e6
            rows.append([task, NAMES[arm], str(len(seeds)), f"{own.mean():.1%}", shown, f"{million:.2f}"])
    header = ["task", "training", "seeds", "test problems solved", "gain over SFT [95%]", "million compute tokens"]
    return markdown_table(header, rows)


def make_parser() -> argparse.ArgumentParser:
    return argparse.ArgumentParser(description=__doc__)


if __name__ == "__main__":
    make_parser().parse_args()
    sys.stdout.write(table())
