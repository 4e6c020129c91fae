"""Rollouts ahead of updates, next to rollouts in turn (PROTOCOL.md): every run appends a line to data/runs.jsonl.

    python -m studies.staleness.run                # what is missing of two tasks, three seeds and three arms

Trainer and server are two processes of one thread each. What they compute does not depend on their speed, so a run ends
after a number of rollouts, and its seconds on two free cores follow from the processor seconds of both processes.
"""

from __future__ import annotations

import argparse
import logging
import os
import re
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from itertools import groupby
from operator import itemgetter
from pathlib import Path
from typing import Any, NamedTuple

from transformers import TrainerCallback

from pocket.recipes import RECIPES, ROOT
from studies.json_lines import append_line, read_lines
from studies.leaderboard.plan import TASKS
from studies.leaderboard.run import evaluate, logs_of, train

logger = logging.getLogger(__name__)

DATA = Path(__file__).resolve().parent / "data"
SEEDS = (0, 1, 2)
RATE = {"sudoku": 3e-4, "arithmetic": 1e-4}  # those of pocket.yaml and pocket/demo.py, not tuned


class Arm(NamedTuple):
    """`rollout_staleness`, and the rollouts (each has one update) after which the run ends."""

    staleness: int
    rollouts: int


ARMS = {"in turn": Arm(0, 24), "1 ahead": Arm(1, 44), "2 ahead": Arm(2, 44)}


class Clock(TrainerCallback):
    """The seconds of training: of the clock, and of the trainer's and the server's processor."""

    def __init__(self, server: int) -> None:
        self.server = server
        self.found: dict[str, float] = {}

    def now(self) -> dict[str, float]:
        parts = Path(f"/proc/{self.server}/stat").read_text().rpartition(")")[2].split()
        server = (int(parts[11]) + int(parts[12])) / os.sysconf("SC_CLK_TCK")  # utime and stime
        return {"clock": time.perf_counter(), "trainer": time.process_time(), "server": server}

    def on_train_begin(self, *args: Any, **kwargs: Any) -> None:
        self.started = self.now()

    def on_train_end(self, *args: Any, **kwargs: Any) -> None:
        self.found = {name: round(value - self.started[name], 2) for name, value in self.now().items()}


def free_seconds(trainer: float, server: float, rollouts: int, staleness: int) -> float:
    """Seconds of a run on two free cores, from the processor seconds of both processes. In turn they add up. Ahead, one
    process waits for the other in the first rollout and the last update alone; between these the slower one is always
    at work."""
    if not staleness:
        return trainer + server
    return max(trainer, server) + min(trainer, server) / rollouts


def flags_of(task: str, arm: Arm, seed: int, url: str, folder: Path) -> list[str]:
    flags: list[object] = ["--config", ROOT / "diffu-grpo" / "pocket.yaml", "--method", "agrpo-entropy"]
    flags += ["--num_views", 8, "--views_at_once", 64, "--dataset", TASKS[task].dataset, *TASKS[task].flags]
    flags += ["--block_length", 8, "--diffusion_steps", TASKS[task].length // 2, "--seed", seed]
    flags += [
        "--num_generations",
        8,
        "--per_device_train_batch_size",
        32,
        "--max_steps",
        arm.rollouts,
        "--learning_rate",
        RATE[task],
    ]
    flags += ["--lr_scheduler_type", "linear", "--lr_scheduler_kwargs", "{}", "--warmup_steps", 0]
    flags += ["--model_path", ROOT / "pocket" / RECIPES[task].base, "--output_dir", folder]
    flags += ["--eval_strategy", "no", "--save_strategy", "no", "--logging_steps", 1]
    flags += ["--rollout_mode", "server", "--rollout_server_base_url", url, "--rollout_staleness", arm.staleness]
    return [*map(str, flags), "--disable_tqdm", "true"]


@contextmanager
def serving(task: str, folder: Path) -> Iterator[tuple[str, int]]:
    """The address and the process id of a server of the task's base model."""
    words = ["-m", "d1", "serve", str(ROOT / "pocket" / RECIPES[task].base), "--port", "0", "--batch_size", "64"]
    words += ["--weights_dir", "/dev/shm", "--weights_dir", str(folder)]
    environment = os.environ | {"OMP_NUM_THREADS": "1"}
    server = subprocess.Popen([sys.executable, *words], env=environment, stderr=subprocess.PIPE, text=True, cwd=ROOT)
    try:
        assert server.stderr is not None
        found = next(match for line in server.stderr if (match := re.search(r"on (http://\S+)", line)))
        yield found[1], server.pid
    finally:
        server.terminate()
        server.communicate()


def one(task: str, arm: Arm, seed: int, server: tuple[str, int], own: Path) -> dict[str, Any]:
    """Trains and judges an arm: greedy, the exact sampler."""
    shutil.rmtree(own, ignore_errors=True)  # of a run that was killed
    clock = Clock(server[1])
    error = train(own.name, flags_of(task, arm, seed, server[0], own), [clock])
    judged = evaluate(task, own, own / "judged", ["--split", "test"])
    seconds = {f"{name}_seconds": value for name, value in clock.found.items()}
    logs = {name: value for name, value in logs_of(own).items() if name in ("rollouts", "compute")}
    shutil.rmtree(own)
    return {"error": error, **seconds, **logs, "right": judged["right"], "problems": judged["problems"]}


def runs() -> Iterator[dict[str, Any]]:
    """All runs: both tasks with the first two arms, then the third arm."""
    for arms in (("in turn", "1 ahead"), ("2 ahead",)):
        for task in RATE:
            for seed in SEEDS:
                for arm in arms:
                    yield {"task": task, "seed": seed, "arm": arm}


def make_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--output_dir", default="runs/staleness")
    return parser


def main(args: argparse.Namespace) -> None:
    file, folder = DATA / "runs.jsonl", Path(args.output_dir).resolve()
    folder.mkdir(parents=True, exist_ok=True)
    there = [{name: line[name] for name in ("task", "seed", "arm")} for line in read_lines(file)]
    for task, group in groupby((run for run in runs() if run not in there), itemgetter("task")):
        with serving(task, folder) as server:
            for run in group:
                line = one(task, ARMS[run["arm"]], run["seed"], server, folder / task)
                append_line(file, run | line)
                logger.info("%s: %.3f", " ".join(map(str, run.values())), line["right"].count("1") / len(line["right"]))


if __name__ == "__main__":
    logging.basicConfig(level=logging.INFO, format="%(message)s")
    main(make_parser().parse_args())
