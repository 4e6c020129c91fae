"""python benchmarks/scaling.py [--size pocket] [--repeats 3] [--output_dir DIR]

Measures how a rollout's and a scoring pass's time and peak memory grow with canvas length, rows, mu and vocabulary, one
at a time, and fits time ~ x^a and memory ~ x^a by least squares on logarithms. Then runs the real RL trainer in one and
in two processes (gloo, data parallel). What more GPUs would bring LLaDA-8B is computed in `docs/hardware.md`.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import torch

sys.path.insert(0, str(Path(__file__).parents[1]))

from benchmarks.machine import check_counts, describe, peak_bytes, seconds
from benchmarks.random_models import MASK, SIZES, our_scores, random_model, random_prompts, scoring_inputs
from benchmarks.reports import write_report
from d1 import sampling
from d1.runs.entry import leave, run_script

BASE = {"length": 64, "rows": 2, "mu": 2, "vocabulary": 2048}
GROWTH = {"length": (64, 128, 256), "rows": (2, 4, 8), "mu": (2, 4, 8), "vocabulary": (2048, 8192, 32768)}
PROMPT, BLOCK, STEPS_PER_TOKEN = 64, 32, 0.5
MEANING = {
    "length": "a rollout's steps and passes both grow, its time towards 2 and beyond once attention weighs, scoring's "
    "towards 1; memory is the body's states and a chunk of logits, towards 1",
    "rows": "time towards 1 once a pass is large enough to fill the processor, memory 1",
    "mu": "one scoring pass a mask, one after the other: time 1, memory 0; the rollout knows no mu",
    "vocabulary": "only the head grows, at hidden and scored positions: towards 1 where it outweighs the body",
}

# The RL trainer in processes: rows a process, and what is compared with one process
PROCESSES = {"1 process": (1, 4), "2 processes, as many rows each": (2, 4), "2 processes, half the rows each": (2, 2)}
RL = {"size": "60m", "prompt": 32, "length": 32, "block": 16, "steps": 16, "mu": 2}


def exponent(xs: list[float], ys: list[float]) -> float:
    """a of the least-squares line log y = a log x + b."""
    lx, ly = [math.log(x) for x in xs], [math.log(y) for y in ys]
    return statistics.linear_regression(lx, ly).slope


def measure_growth(size: str, at: dict[str, int], repeats: int) -> dict[str, float]:
    """Processor seconds (median) and peak bytes of a rollout and of scoring it under mu masks."""
    model = random_model(size, at["vocabulary"])
    ids, mask = random_prompts(model, at["rows"], PROMPT)
    inputs = scoring_inputs(model, argparse.Namespace(prompt=PROMPT, **at))
    lengths = {"gen_length": at["length"], "block_length": BLOCK, "steps": int(at["length"] * STEPS_PER_TOKEN)}
    options: dict[str, Any] = {"mask_token_id": MASK, **lengths}
    runs = {
        "rollout": lambda: sampling.generate(model, ids, mask, **options),
        "scoring": torch.no_grad()(lambda: our_scores(model, *inputs)),
    }
    kind = 0 if torch.cuda.is_available() else 1
    found = {}
    for name, run in runs.items():
        found[f"{name} bytes"] = float(peak_bytes(run))  # also the warm-up
        found[f"{name} seconds"] = statistics.median(seconds(run)[kind] for _ in range(repeats))
    return found


def grow(size: str, repeats: int) -> dict[str, dict[str, Any]]:
    """For each variable: the values tried, what was measured, and the fitted exponents."""
    results: dict[str, dict[str, Any]] = {}
    for name, values in GROWTH.items():
        rows = [measure_growth(size, BASE | {name: value}, repeats) for value in values]
        fits = {key: exponent([float(v) for v in values], [row[key] for row in rows]) for key in rows[0]}
        results[name] = {"values": list(values), "measured": rows, "exponents": fits}
    return results


def run_processes(repeats: int, settings: dict[str, Any] | None = None) -> dict[str, dict[str, float]]:
    """Wall seconds of one rollout and its mu updates by phase, and a process's peak memory, for each of `PROCESSES`
    (launched, real).

    Ideal are the seconds of one process where each has as many rows (twice the work done), half of them where each has
    half the rows. `efficiency` is the ideal over the measured. A GPU gets one process.
    """
    results = {}
    with tempfile.TemporaryDirectory() as folder:
        for name, (count, rows) in PROCESSES.items():
            if torch.cuda.is_available() and count > torch.cuda.device_count():
                continue
            out = Path(folder) / "seconds.json"
            launch = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc_per_node", str(count)]
            worker = json.dumps({**(settings or RL), "rows": rows, "repeats": repeats, "out": str(out)})
            subprocess.run(
                [*launch, __file__, "--worker", worker], check=True, env=os.environ | {"PYTHONWARNINGS": "ignore"}
            )
            phases = json.loads(out.read_text())
            memory = phases.pop("peak_gib")
            if phases.pop("world_size") != count:
                raise RuntimeError(f"{count} processes were launched, but each trained alone")
            row = {"processes": count, "rows a process": rows, "whole": sum(phases.values())}
            results[name] = row | {phase: phases[phase] for phase in ("rollout", "scoring", "update", "optimizer")}
            one = next(iter(results.values()))
            ideal = one["whole"] * rows / one["rows a process"]
            results[name] |= {"efficiency": ideal / row["whole"], "peak GiB a process": memory}
    return results


def work(settings: dict[str, Any]) -> None:
    """One process of `run_processes`: a warm-up and `repeats` rollouts with their updates; the first writes."""
    from benchmarks.clock import Clock
    from benchmarks.rl_steps import rl_trainer, train_rl

    args, clock, rounds = argparse.Namespace(**settings), Clock(), []
    with tempfile.TemporaryDirectory() as folder:
        trainer = rl_trainer(args, Path(folder), clock)
        for _ in range(args.repeats + 1):
            clock.wall.clear()
            train_rl(trainer, "ours", clock)
            rounds.append(dict(clock.wall))
    if trainer.accelerator.is_main_process:
        medians = {phase: statistics.median(found[phase] for found in rounds[1:]) for phase in rounds[0]}
        rest = {
            "world_size": trainer.accelerator.num_processes,
            "peak_gib": trainer.state.log_history[-1]["peak_memory_gb"],
        }
        Path(args.out).write_text(json.dumps(medians | rest))
    trainer.accelerator.end_training()
    leave()


def make_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--size", choices=list(SIZES), default="pocket", help="the body; vocabularies are our own")
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--output_dir", default="benchmark_results")
    parser.add_argument("--worker", help=argparse.SUPPRESS)  # one process of run_processes, its settings as json
    return parser


def main(args: argparse.Namespace) -> None:
    if args.worker:
        return work(json.loads(args.worker))
    check_counts(args, "repeats")
    Path(args.output_dir).mkdir(parents=True, exist_ok=True)
    settings = {key: value for key, value in vars(args).items() if key not in ("output_dir", "worker")}
    growth = grow(args.size, args.repeats)
    report: dict[str, Any] = {"machine": describe(), "settings": settings}
    report["measured"] = {
        f"{name} {value}": row
        for name, found in growth.items()
        for value, row in zip(found["values"], found["measured"], strict=True)
    }
    report["fitted exponents"] = {f"in {name}": found["exponents"] for name, found in growth.items()}
    report["the RL trainer in processes, wall seconds a rollout and its updates"] = run_processes(args.repeats)
    remarks = ["Exponents to expect of large sizes; fixed costs keep those of small ones below:", ""]
    report["remarks"] = remarks + [f"- {name}: {meaning}." for name, meaning in MEANING.items()]
    write_report(report, args.output_dir, "scaling")


if __name__ == "__main__":
    run_script("scaling.py", lambda: main(make_parser().parse_args()))
