"""python benchmarks/scaling.py [--size tiny] [--repeats 3] [--output_dir DIR] [--peak_tflops 989 --bandwidth_tb 3.35]

Measures how a rollout's and a scoring pass's time and peak memory grow with canvas length, rows, mu and vocabulary, one
at a time, fits time ~ x^a and memory ~ x^a by least squares on logarithms, and projects LLaDA-8B on 1 to 64 GPUs from a
roofline. The projection is arithmetic, not a measurement: a forward pass takes as long as its floating-point operations
at `--efficiency` of the peak, or as reading its weights once, whichever is longer; data parallel, LoRA, bf16; GPUs that
have fewer than one row are idle; the adapter's all-reduce is counted, everything else is not.
"""

from __future__ import annotations

import argparse
import json
import math
import statistics
import sys
from pathlib import Path
from typing import Any

import torch

sys.path.insert(0, str(Path(__file__).parents[1]))

from benchmarks.bench import our_scores
from benchmarks.machine import MASK, SIZES, describe, peak_bytes, random_model, random_prompts, seconds
from d1 import sampling

BASE = {"length": 64, "rows": 2, "mu": 2, "vocabulary": 2048}
GROWTH = {"length": (64, 128, 256), "rows": (2, 4, 8), "mu": (2, 4, 8), "vocabulary": (2048, 8192, 32768)}
PROMPT, BLOCK, STEPS_PER_TOKEN = 64, 32, 0.5

LLADA = {"layers": 32, "hidden": 4096, "feed_forward": 12_288, "vocabulary": 126_464}
# d1's RL run: 96 completions an optimizer step, each rollout used mu times; LoRA of rank 128 on all linear layers.
D1 = {"completions": 96, "prompt": 200, "length": 256, "steps": 128, "block": 32, "mu": 12, "lora_rank": 128}


def exponent(xs: list[float], ys: list[float]) -> float:
    """a of the least-squares line log y = a log x + b."""
    lx, ly = [math.log(x) for x in xs], [math.log(y) for y in ys]
    return statistics.linear_regression(lx, ly).slope


def measure(size: str, at: dict[str, int], repeats: int) -> dict[str, float]:
    """Processor seconds (median) and peak bytes of a rollout and of scoring it under mu masks."""
    model = random_model(size, at["vocabulary"])
    ids, mask = random_prompts(model, at["rows"], PROMPT)
    completion, _ = random_prompts(model, at["rows"], at["length"])
    noise = torch.rand(at["rows"], at["mu"], PROMPT, generator=torch.Generator().manual_seed(0)).to(ids.device) < 0.15
    lengths = {"gen_length": at["length"], "block_length": BLOCK, "steps": int(at["length"] * STEPS_PER_TOKEN)}
    options: dict[str, Any] = {"mask_token_id": MASK, **lengths}
    runs = {
        "rollout": lambda: sampling.generate(model, ids, mask, **options),
        "scoring": torch.no_grad()(lambda: our_scores(model, ids, mask, completion, noise)),
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
        rows = [measure(size, BASE | {name: value}, repeats) for value in values]
        fits = {key: exponent([float(v) for v in values], [row[key] for row in rows]) for key in rows[0]}
        results[name] = {"values": list(values), "measured": rows, "exponents": fits}
    return results


def forward_flops(rows: float, tokens: int, scored: int) -> float:
    """Of one pass over `rows` sequences of `tokens`, the head at `scored` positions each: 2 a weight and token, and
    4 x hidden x tokens a token and layer for attention."""
    weights = LLADA["layers"] * (4 * LLADA["hidden"] ** 2 + 3 * LLADA["hidden"] * LLADA["feed_forward"])
    attention = LLADA["layers"] * 4 * LLADA["hidden"] * tokens
    return rows * (tokens * (2 * weights + attention) + scored * 2 * LLADA["hidden"] * LLADA["vocabulary"])


def forward_seconds(rows: float, tokens: int, scored: int, args: argparse.Namespace) -> float:
    weights = LLADA["layers"] * (4 * LLADA["hidden"] ** 2 + 3 * LLADA["hidden"] * LLADA["feed_forward"])
    read = 2 * (weights + LLADA["hidden"] * LLADA["vocabulary"]) / (args.bandwidth_tb * 1e12)
    compute = forward_flops(rows, tokens, scored) / (args.peak_tflops * 1e12 * args.efficiency)
    return max(compute, read)


def project(gpus: int, args: argparse.Namespace) -> dict[str, float]:
    """Rollout tokens/s and the seconds of an RL optimizer step of d1's run on `gpus`, data parallel."""
    rows = math.ceil(D1["completions"] / gpus)
    tokens = D1["prompt"] + D1["length"]
    # On average half of a block is still hidden.
    rollout = D1["steps"] * forward_seconds(rows, tokens, D1["block"] // 2, args)
    once = forward_seconds(rows, tokens, D1["length"], args)
    # Each optimizer step: its share of the rollout, old and reference log-probs, forward, recomputation, backward
    # through frozen weights (as dear as a forward).
    adapter = LLADA["layers"] * D1["lora_rank"] * (8 * LLADA["hidden"] + 3 * (LLADA["hidden"] + LLADA["feed_forward"]))
    reduce = 0.0 if gpus == 1 else 2 * 4 * adapter * (gpus - 1) / gpus / (args.network_gb * 1e9)
    step = rollout / D1["mu"] + 2 * once + 3 * once + reduce
    return {
        "gpus": gpus,
        "rows a GPU": rows,
        "rollout tokens/s": D1["completions"] * D1["length"] / rollout,
        "optimizer step seconds": step,
        "share rollout": rollout / D1["mu"] / step,
        "GPU hours for 10,000 steps": step * 10_000 * gpus / 3600,
    }


def as_markdown(report: dict[str, Any]) -> str:
    lines = [f"{key}: {value}  " for key, value in (report["machine"] | report["settings"]).items()]
    keys = list(next(iter(report["growth"].values()))["exponents"])
    lines += ["", f"| exponent in | {' | '.join(keys)} |", "| --- |" + " --- |" * len(keys)]
    for name, found in report["growth"].items():
        lines.append(f"| {name} | {' | '.join(format(found['exponents'][key], '.2f') for key in keys)} |")
    columns = list(report["projection"][0])
    lines += ["", "LLaDA-8B, by roofline, not measured:", ""]
    lines += [f"| {' | '.join(columns)} |", "|" + " --- |" * len(columns)]
    lines += [f"| {' | '.join(f'{row[c]:.4g}' for c in columns)} |" for row in report["projection"]]
    return "\n".join(lines) + "\n"


def make_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--size", choices=list(SIZES), default="tiny", help="the body; vocabularies are our own")
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--peak_tflops", type=float, default=989.0, help="dense bf16 peak of a GPU (default: H100 SXM)")
    parser.add_argument("--bandwidth_tb", type=float, default=3.35, help="memory bandwidth, TB/s")
    parser.add_argument("--network_gb", type=float, default=50.0, help="all-reduce bandwidth a GPU, GB/s")
    parser.add_argument("--efficiency", type=float, default=0.4, help="share of the peak that is reached")
    parser.add_argument("--output_dir", default="benchmark_results")
    return parser


def main(args: argparse.Namespace) -> None:
    if not 0 < args.efficiency <= 1:
        raise ValueError(f"--efficiency must be in (0, 1], got {args.efficiency}")
    settings = {key: value for key, value in vars(args).items() if key != "output_dir"}
    report: dict[str, Any] = {"machine": describe(), "settings": settings, "growth": grow(args.size, args.repeats)}
    report["projection"] = [project(gpus, args) for gpus in (1, 2, 4, 8, 16, 32, 64)]
    folder = Path(args.output_dir)
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "scaling.json").write_text(json.dumps(report, indent=1))
    (folder / "scaling.md").write_text(as_markdown(report))
    sys.stdout.write(as_markdown(report))


if __name__ == "__main__":
    main(make_parser().parse_args())
