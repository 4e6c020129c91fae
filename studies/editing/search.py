"""Choose the noise and the editing threshold of `run.py`, on validation problems and a seed that it does not use.

    OMP_NUM_THREADS=1 python -m studies.editing.search

A line per candidate and task goes to data/search.jsonl, and one that is there is not made again. The protocol is in
README.md; the table is made by `python -m studies.editing.report`.
"""

from __future__ import annotations

import argparse
from itertools import product
from pathlib import Path
from typing import Any

from d1.ranges import COUNT
from d1.runs.entry import OneLineParser, run_script
from d1.tasks import load_task
from pocket.recipes import RECIPES
from studies.editing.run import BASES, measured, trained
from studies.json_lines import append_line, read_lines

DATA = Path(__file__).parent / "data" / "search.jsonl"
SEED = 10


def candidate(kind: str, share: float, weight: float = 1.0) -> dict[str, Any]:
    return {"edit_noise": kind, "edit_share": share, "edit_weight": weight}


CANDIDATES: dict[str, dict[str, Any]] = {
    "masks": {},
    "draft 0.5": candidate("draft", 0.5),
    "draft 1": candidate("draft", 1.0),
    "uniform 0.1": candidate("uniform", 0.1),
    "draft 0.1": candidate("draft", 0.1),
    "uniform 0.5": candidate("uniform", 0.5),
    "draft 0.5, weight 3": candidate("draft", 0.5, 3.0),
}
PLAIN: dict[str, dict[str, Any]] = {f"{level}": {"reveal_level": level} for level in (0.3, 0.5, 0.7, 0.9)}
THRESHOLDS = (0.5, 0.8)
EDITING: dict[str, dict[str, Any]] = {
    f"{level}, above {threshold}, {budget}": {
        "reveal_level": level,
        "edit_threshold": threshold,
        "max_post_steps": budget,
    }
    for level, threshold, budget in product((0.3, 0.5, 0.7), THRESHOLDS, (0, 1))
}


def make_parser() -> argparse.ArgumentParser:
    parser = OneLineParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--problems", type=COUNT, default=256, help="per task (default: %(default)s)")
    parser.add_argument("--epochs", type=COUNT, default=1, help="of SFT (default: %(default)s)")
    parser.add_argument("--output_dir", default="runs/editing", help="of the trained models (default: %(default)s)")
    return parser


def main(args: argparse.Namespace) -> None:
    there = {(line["task"], line["noise"]) for line in read_lines(DATA)}
    for (name, noise), task in product(CANDIDATES.items(), BASES):
        if (task, name) in there:
            continue
        rows = load_task(RECIPES[task].task).load_rows("validation")
        rows = rows.select(range(min(args.problems, len(rows))))
        found = measured(trained(task, SEED, noise, args), task, rows, PLAIN | (EDITING if noise else {}))
        append_line(DATA, {"task": task, "seed": SEED, "noise": name, "epochs": args.epochs, "samplers": found})


if __name__ == "__main__":
    run_script("studies.editing.search", lambda: main(make_parser().parse_args()))
