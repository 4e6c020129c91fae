"""python -m benchmarks.processes [--jobs rl sft] [--size 60m] [--repeats 3] [--output_dir DIR]

Where the time between one process and two goes. Both trainers, all weights trained, each process with as many rows:
alone, as two that know nothing of each other, and as two that train together under DDP, ZeRO-2 and ZeRO-3 (launched
by Accelerate with the shipped configs, in fp32). What two strangers lose to each other are shared caches, memory and
clock rates; what a pair loses beyond them is communication and waiting. Every number is of one rollout with its mu
updates, or of mu SFT updates: wall seconds of the first process, the median of the rounds after the first.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import torch

from benchmarks.machine import check_counts, describe
from benchmarks.random_models import ROOT, SIZES
from benchmarks.reports import write_report
from d1.runs.entry import leave, run_script

if TYPE_CHECKING:
    from benchmarks.clock import Clock

LAUNCH = ("-m", "accelerate.commands.launch", "--mixed_precision", "no", "--main_process_port", "0")


class Way(NamedTuple):
    """How processes train: so many runs of their own at once, each of so many processes that train together."""

    runs: int
    together: int
    share: float = 1  # of its rows that a process has
    config: str = ""  # Accelerate's


STRANGERS = "two strangers"
WAYS = {
    "alone": Way(1, 1),
    STRANGERS: Way(2, 1),
    "DDP": Way(1, 2, config="launch/ddp.yaml"),
    "DDP, half the rows": Way(1, 2, 0.5, config="launch/ddp.yaml"),
    "ZeRO-2": Way(1, 2, config="diffu-grpo/accelerate.yaml"),
    "ZeRO-3": Way(1, 2, config="launch/zero3.yaml"),
}
JOBS: dict[str, dict[str, int]] = {
    "rl": {"rows": 4, "prompt": 32, "length": 32, "block": 16, "steps": 16, "mu": 2},
    "sft": {"rows": 4, "prompt": 32, "length": 96, "block": 16, "steps": 0, "mu": 4},
}
PHASES = ("rollout", "scoring", "update", "optimizer")
PATIENCE = 600  # seconds that a run waits for the other


def command(way: Way) -> list[str]:
    """Of one run, up to the script."""
    launch = [*LAUNCH, "--config_file", str(ROOT / way.config), "--num_processes", str(way.together)]
    return [sys.executable, *(launch if way.together > 1 else [])]


def measure(way: Way, settings: dict[str, Any], folder: Path) -> dict[str, Any]:
    """What the first process wrote (`work`)."""
    started = []
    for place in range(way.runs):
        mine = {"place": place, "runs": way.runs, "folder": str(folder), "rows": int(settings["rows"] * way.share)}
        # A GPU of its own for each stranger; a launcher shares them out itself.
        own = {"CUDA_VISIBLE_DEVICES": str(place)} if way.runs > 1 and torch.cuda.is_available() else {}
        flags = (__file__, "--worker", json.dumps(settings | mine))
        env = os.environ | {"PYTHONWARNINGS": "ignore"} | own
        started.append(subprocess.Popen([*command(way), *flags], env=env))
    if any([process.wait() for process in started]):
        raise RuntimeError("a process failed; what it said stands above")
    return json.loads((folder / "written.json").read_text())


def compare(settings: dict[str, Any]) -> dict[str, dict[str, float]]:
    """A row for each of `WAYS`: processes, seconds in all and by phase, and seconds over those alone, and over those of
    strangers (for half the rows each, of half as long)."""
    found: dict[str, dict[str, float]] = {}
    for name, way in WAYS.items():
        with tempfile.TemporaryDirectory() as folder:
            written = measure(way, settings, Path(folder))
        if written["together"] != way.together:
            raise RuntimeError(f"{name}: {way.together} processes were to train together, not {written['together']}")
        seconds = written["seconds"]
        row = {"processes": float(way.runs * way.together), "whole": sum(seconds.values())}
        row |= {phase: seconds.get(phase, 0.0) for phase in PHASES}
        row["the rest"] = row["whole"] - sum(row[phase] for phase in PHASES)
        found[name] = row | {"peak GiB a process": written["peak GiB"]}
    for name, row in found.items():
        for other in ("alone", STRANGERS):
            row[f"over {other}"] = row["whole"] / (WAYS[name].share * found[other]["whole"])
    return found


def work(settings: dict[str, Any]) -> None:
    """One process: a warm-up and `repeats` rounds. The first writes the median seconds of each phase, how many trained
    together, and its peak memory."""
    from benchmarks.clock import Clock

    args, clock, folder = argparse.Namespace(**settings), Clock(), Path(settings["folder"])
    changes: dict[str, Any] = {"bf16": False}
    if "WORLD_SIZE" in os.environ and not torch.cuda.is_available():
        changes["ddp_backend"] = "gloo"
    trainer = make_trainer(args, folder / f"{args.place}-{os.environ.get('RANK', '0')}", clock, changes)
    rounds = rounds_of(trainer, args, clock)
    if args.place == 0 and trainer.accelerator.is_main_process:
        from d1.rl.metrics import peak_memory_gb  # `rl_steps` has put its folder on the path

        medians = {phase: statistics.median(seconds[phase] for seconds in rounds) for phase in rounds[0]}
        written = {"seconds": medians, "together": trainer.accelerator.num_processes, "peak GiB": peak_memory_gb()}
        (folder / "written.json").write_text(json.dumps(written))
    trainer.accelerator.end_training()
    leave()


def make_trainer(args: argparse.Namespace, output_dir: Path, clock: Clock, changes: dict[str, Any]) -> Any:
    if args.job == "rl":
        from benchmarks.rl_steps import rl_trainer

        return rl_trainer(args, output_dir, clock, **changes)
    from benchmarks.sft_steps import dLLMTrainer, sft_trainer

    return sft_trainer(dLLMTrainer, args, output_dir, clock, **changes)


def rounds_of(trainer: Any, args: argparse.Namespace, clock: Clock) -> list[dict[str, float]]:
    """Trains the warm-up and the rounds without a stop, strangers from the same moment on; seconds of each round."""
    from transformers import TrainerCallback

    from benchmarks.rl_steps import train_rl

    rounds: list[dict[str, float]] = []
    mu = args.mu

    class Rounds(TrainerCallback):
        def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
            if state.global_step % mu:
                return
            clock.turn()
            rounds.append(dict(clock.wall))
            clock.wall.clear()

    def meet() -> None:
        folder, started = Path(args.folder), time.monotonic()
        (folder / f"ready{args.place}").touch()
        while len(list(folder.glob("ready*"))) < args.runs:
            if time.monotonic() - started > PATIENCE:
                raise TimeoutError(f"the other run was not ready within {PATIENCE} s")
            time.sleep(0.01)

    trainer.add_callback(Rounds())
    trainer.args.max_steps = args.mu * (args.repeats + 1)
    meet()
    if args.job == "rl":
        train_rl(trainer, "ours", clock)
    else:
        trainer.train()
    return rounds[1:]


def make_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--jobs", nargs="+", choices=[*JOBS], default=[*JOBS])
    parser.add_argument("--size", choices=[name for name in SIZES if name != "pocket"], default="60m")
    parser.add_argument("--repeats", type=int, default=3, help="rounds after the first")
    parser.add_argument("--output_dir", default="benchmark_results")
    parser.add_argument("--worker", help=argparse.SUPPRESS)  # a process of `measure`, its settings as json
    return parser


def main(args: argparse.Namespace) -> None:
    if args.worker:
        return work(json.loads(args.worker))
    check_counts(args, "repeats")
    if torch.cuda.is_available() and torch.cuda.device_count() < 2:
        raise ValueError("two processes need two GPUs; CUDA_VISIBLE_DEVICES= measures on the processor")
    Path(args.output_dir).mkdir(parents=True, exist_ok=True)
    named = {"jobs": " ".join(args.jobs), "size": args.size, "repeats": args.repeats}
    report: dict[str, Any] = {"machine": describe(), "settings": named}
    for job in args.jobs:
        report[f"{job}, wall seconds"] = compare({"job": job, "size": args.size, "repeats": args.repeats} | JOBS[job])
    write_report(report, args.output_dir, "processes")


if __name__ == "__main__":
    run_script("processes.py", lambda: main(make_parser().parse_args()))
