"""The models that are distilled: a pocket task's base after SFT and RL, as `pocket/demo.py` trains them.

    python -m studies.distill.teachers --tasks sudoku arithmetic --seeds 0 1 2

A few minutes per model on one core; a killed command continues. `studies.distill.run` makes what is missing.
"""

from __future__ import annotations

import argparse
import fcntl
from itertools import product
from pathlib import Path

from rich.console import Console

from d1.ranges import SEED
from d1.runs.cli import OneLineParser, run_script
from pocket.demo import phases_of
from pocket.phases import run_phases

TASKS = ("sudoku", "arithmetic")
SEEDS = (0, 1, 2)
OUTPUT = "runs/distill"


def teacher(task: str, seed: int, output_dir: str | Path = OUTPUT) -> Path:
    """The folder of the model after SFT and diffu-GRPO; trained first if it is missing."""
    folder = Path(output_dir).resolve() / task / f"seed{seed}"
    phases = [phase for phase in phases_of(folder, seed, False, task) if phase.name in ("sft", "sft_grpo")]
    folder.mkdir(parents=True, exist_ok=True)
    with (folder / "lock").open("a") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not (folder / "sft_grpo" / "README.md").exists():  # the card, which is written last
            run_phases(phases, folder, jobs=1, console=Console())
    return folder / "sft_grpo"


def make_parser() -> argparse.ArgumentParser:
    parser = OneLineParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tasks", nargs="+", choices=TASKS, default=list(TASKS))
    parser.add_argument("--seeds", nargs="+", type=SEED, default=list(SEEDS))
    parser.add_argument("--output_dir", default=OUTPUT)
    return parser


def main(args: argparse.Namespace) -> None:
    for seed, task in product(args.seeds, args.tasks):
        teacher(task, seed, args.output_dir)


if __name__ == "__main__":
    run_script("studies.distill.teachers", lambda: main(make_parser().parse_args()))
