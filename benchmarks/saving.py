"""python -m benchmarks.saving [--size 60m] [--steps_between 100] [--output_dir DIR]

How long training stops for a checkpoint, all weights trained: the model, AdamW's state, in RL the rollout in use. The
real trainers save after each of a few steps; the share is of the time between two saves, `--steps_between` steps apart,
as d1's settings have it. Wall seconds, for a disk is waited for.
"""

from __future__ import annotations

import argparse
import tempfile
from pathlib import Path
from typing import Any

from transformers.trainer_utils import SaveStrategy

from benchmarks.clock import Clock
from benchmarks.machine import check_counts, describe
from benchmarks.random_models import SIZES
from benchmarks.reports import write_report
from benchmarks.rl_steps import rl_trainer
from benchmarks.sft_steps import dLLMTrainer, sft_trainer
from d1.runs.entry import run_script

SFT = {"rows": 8, "prompt": 64, "length": 192, "mu": 2}
RL = {"rows": 4, "prompt": 48, "length": 48, "block": 24, "steps": 24, "mu": 4}


def cost(trainer: Any, clock: Clock, steps_between: int) -> dict[str, float]:
    """Seconds of a checkpoint, on the clock and of the processor, and of a step; a checkpoint's size and share."""
    trainer.args.save_strategy, trainer.args.save_steps, trainer.args.save_total_limit = SaveStrategy.STEPS, 1, 1
    clock.watch(trainer, "_save_checkpoint", "checkpoint")
    trainer.train()
    steps = trainer.args.max_steps
    write, whole = clock.wall["checkpoint"] / steps, sum(clock.wall.values()) / steps
    step = whole - write
    [folder] = Path(trainer.args.output_dir).glob("checkpoint-*")
    row = {"checkpoint seconds": write, "of them processor": clock.cpu["checkpoint"] / steps, "step seconds": step}
    row["GB"] = sum(file.stat().st_size for file in folder.rglob("*")) / 1e9
    return row | {"share, %": 100 * write / (write + steps_between * step)}


def make_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--size", choices=[*SIZES], default="60m")
    parser.add_argument("--steps_between", type=int, default=100, help="optimizer steps from one save to the next")
    parser.add_argument("--output_dir", default="benchmark_results")
    return parser


def main(args: argparse.Namespace) -> None:
    check_counts(args, "steps_between")
    Path(args.output_dir).mkdir(parents=True, exist_ok=True)
    results = {}
    for name, settings in (("SFT", SFT), ("RL", RL)):
        shape, clock = argparse.Namespace(size=args.size, **settings), Clock()
        with tempfile.TemporaryDirectory(dir=args.output_dir) as folder:  # on the disk that runs are written to
            make = rl_trainer if name == "RL" else lambda *rest: sft_trainer(dLLMTrainer, *rest)
            results[name] = cost(make(shape, Path(folder), clock), clock, args.steps_between)
    settings = {"size": args.size, "steps between": args.steps_between}
    write_report({"machine": describe(), "settings": settings, "results": results}, args.output_dir, "saving")


if __name__ == "__main__":
    run_script("saving.py", lambda: main(make_parser().parse_args()))
