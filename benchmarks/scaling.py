"""python -m benchmarks.scaling [--size pocket] [--repeats 3] [--output_dir DIR]

Measures how a rollout's and a scoring pass's time and peak memory grow with canvas length, rows, mu and vocabulary, one
at a time, and fits time ~ x^a and memory ~ x^a by least squares on logarithms. Two processes are the matter of
`processes.py`; what more GPUs would bring LLaDA-8B is computed in `docs/hardware.md`.
"""

from __future__ import annotations

import argparse
import math
import statistics
from pathlib import Path
from typing import Any

import torch

from benchmarks.machine import check_counts, describe, peak_bytes, seconds
from benchmarks.random_models import MASK, SIZES, our_scores, random_model, random_prompts, scoring_inputs
from benchmarks.reports import write_report
from d1 import sampling
from d1.runs.entry import run_script

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


def make_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--size", choices=list(SIZES), default="pocket", help="the body; vocabularies are our own")
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--output_dir", default="benchmark_results")
    return parser


def main(args: argparse.Namespace) -> None:
    check_counts(args, "repeats")
    Path(args.output_dir).mkdir(parents=True, exist_ok=True)
    settings = {key: value for key, value in vars(args).items() if key != "output_dir"}
    growth = grow(args.size, args.repeats)
    report: dict[str, Any] = {"machine": describe(), "settings": settings}
    report["measured"] = {
        f"{name} {value}": row
        for name, found in growth.items()
        for value, row in zip(found["values"], found["measured"], strict=True)
    }
    report["fitted exponents"] = {f"in {name}": found["exponents"] for name, found in growth.items()}
    remarks = ["Exponents to expect of large sizes; fixed costs keep those of small ones below:", ""]
    report["remarks"] = remarks + [f"- {name}: {meaning}." for name, meaning in MEANING.items()]
    write_report(report, args.output_dir, "scaling")


if __name__ == "__main__":
    run_script("scaling.py", lambda: main(make_parser().parse_args()))
