"""Measure what sampling ahead saves: the same RL run on one server, with `--rollout_staleness` 0 and 1.

    python -m benchmarks.ahead

The server has one core and the trainer another. Both arms make the same number of rollouts and updates; they alternate,
pair by pair. Prints each run's seconds of training, and the ratio of the arms with a 95% t interval over pairs.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path

import numpy as np
from scipy import stats

from benchmarks.machine import address_of, describe
from d1.ranges import COUNT
from d1.runs.cli import OneLineParser, run_script

ROOT = Path(__file__).resolve().parents[1]
BASE = ROOT / "pocket" / "base"
RUN = (  # agrpo takes old log-probabilities from the rollout, so that both arms make the same forward passes
    "--dataset sudoku --method agrpo --max_completion_length 32 --block_length 8 --diffusion_steps 16 "
    "--num_generations 8 --per_device_train_batch_size 64 --gradient_accumulation_steps 1 --max_prompt_length 18 "
    "--temperature 0.9 --learning_rate 3e-4 --eval_strategy no --save_strategy no --report_to none --use_cpu true "
    "--bf16 false --rollout_mode server"
)


def make_parser() -> argparse.ArgumentParser:
    parser = OneLineParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--pairs", type=COUNT, default=5, help="runs of each arm (default: %(default)s)")
    parser.add_argument("--steps", type=COUNT, default=40, help="rollouts of a run, each with one update")
    return parser


@contextlib.contextmanager
def serving(folder: Path, core: int) -> Iterator[str]:
    """The address of a server of the pocket model on one core, which takes weights from below `folder`."""
    words = [sys.executable, "-m", "d1", "serve", str(BASE), "--port", "0", "--batch_size", "64"]
    words += ["--weights_dir", str(folder)]
    process = subprocess.Popen(pinned(words, core), cwd=ROOT, stderr=subprocess.PIPE, text=True)
    try:
        yield address_of(process)
    finally:
        process.kill()
        process.wait()


def pinned(words: Sequence[str], core: int) -> list[str]:
    """The command on one core."""
    return ["taskset", "--cpu-list", str(core), *words]


def training_seconds(folder: Path, url: str, steps: int, staleness: int, core: int) -> float:
    """The seconds of training of one run, without its start.

    Raises:
        OSError: the run failed; the message has the end of what it wrote.
    """
    words = [
        sys.executable,
        "-m",
        "d1",
        "rl",
        "--model_path",
        str(BASE),
        *RUN.split(),
        "--rollout_server_base_url",
        url,
    ]
    words += ["--max_steps", str(steps), "--rollout_staleness", str(staleness), "--output_dir", str(folder)]
    done = subprocess.run(pinned(words, core), cwd=ROOT, capture_output=True, text=True)
    if done.returncode:
        raise OSError(f"a run failed: {done.stderr[-2000:].strip()}")
    lines = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    return float(next(line["train_runtime"] for line in lines if "train_runtime" in line))


def ratio_interval(ahead: Sequence[float], in_turn: Sequence[float]) -> tuple[float, float, float]:
    """The geometric mean of the pairs' ratios, and its 95% interval by t of their logarithms."""
    logs = np.log(ahead) - np.log(in_turn)
    half = stats.t.ppf(0.975, len(logs) - 1) * logs.std(ddof=1) / np.sqrt(len(logs))
    mean = logs.mean()
    return float(np.exp(mean)), float(np.exp(mean - half)), float(np.exp(mean + half))


def main(args: argparse.Namespace) -> None:
    if args.pairs < 2:
        raise ValueError(f"--pairs {args.pairs}: an interval needs at least 2")
    cores = sorted(os.sched_getaffinity(0))
    if len(cores) < 2:
        raise ValueError("one core for the server and one for the trainer are needed, and this machine has one")
    os.environ["OMP_NUM_THREADS"] = "1"
    os.environ["HF_HUB_OFFLINE"] = "1"
    seconds: dict[int, list[float]] = {0: [], 1: []}
    with tempfile.TemporaryDirectory() as folder, serving(Path(folder), cores[1]) as url:
        for pair in range(args.pairs):
            for staleness in (0, 1) if pair % 2 == 0 else (1, 0):
                run = Path(folder) / f"{pair}-{staleness}"
                seconds[staleness].append(training_seconds(run, url, args.steps, staleness, cores[0]))
                sys.stdout.write(f"pair {pair + 1} of {args.pairs}, staleness {staleness}: ")
                sys.stdout.write(f"{seconds[staleness][-1]:.1f} s for {args.steps} rollouts\n")
                sys.stdout.flush()
    mean, low, high = ratio_interval(seconds[1], seconds[0])
    sys.stdout.write(f"{', '.join(f'{name} {value}' for name, value in describe().items())}\n")
    sys.stdout.write(f"one ahead / in turn: {mean:.2f} [{low:.2f}, {high:.2f}] of the seconds\n")


if __name__ == "__main__":
    run_script("ahead", lambda: main(make_parser().parse_args()))
