"""Race this library against the published way (`benchmarks/published.py`) and the bare transformer, in one process.

    python -m benchmarks.bench sampler --size goal --output_dir benchmark_results

writes `sampler_goal.json` and `.md` there. The benchmarks are

    sampler   one rollout: published, ours, and the transformer's forward passes alone
    blocks    one rollout of a block-causal model: with its cache, and computing everything in each step
    scoring   old log-probs under mu masks; one update (loss and gradients)
    memory    peak bytes of both
    rl, sft   whole optimizer steps of the real trainers by phase (`benchmarks/steps.py`): mu of them, on one rollout
    methods   every RL method: a rollout and its updates, at most mu of them, next to its bare passes
    gpu       LLaDA-8B's shape with LoRA: rollout, scoring, update, compiled and not, with flash attention and without

Set OMP_NUM_THREADS=1 to measure one thread.
"""

from __future__ import annotations

import argparse
import functools
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from benchmarks import gpu, steps
from benchmarks.machine import check_counts, describe, multiply_adds, peak_bytes, race
from benchmarks.random_models import MASK, SIZES, random_model, random_prompts, ways
from benchmarks.results import write_report
from benchmarks.rl_steps import POCKET_PROMPT, group_size
from d1.models.head import body_and_head
from d1.runs.entry import run_script
from d1.sampling import rollout
from d1.sampling.reveal import reveal_schedule


def race_samplers(args: argparse.Namespace) -> dict[str, Any]:
    """One greedy rollout each, against the transformer's forward passes alone."""
    model = random_model(args.size)
    ids, _ = random_prompts(model, args.rows, args.prompt)
    body, _ = body_and_head(model)
    canvas = torch.cat([ids, torch.full((args.rows, args.length), MASK, device=ids.device)], dim=1)

    @torch.no_grad()
    def bare() -> None:
        for _ in range(args.steps):
            body(canvas, None)

    rollouts = ways(model, args)["rollout"]
    contestants = {"bare body": bare, "exact": rollouts["exact"], "published": rollouts["published"]}
    work = {name: multiply_adds(run) for name, run in contestants.items()}
    results = race(contestants, args.repeats, base="bare body", warm=True)
    for name, row in results.items():
        row["multiply-adds / bare"] = work[name] / work["bare body"]
    return {"results": results}


def race_blocks(args: argparse.Namespace) -> dict[str, Any]:
    """A model whose own blocks have `block` tokens: time, tokens fed through the transformer, and multiplications."""
    model = random_model(args.size, block_size=args.block)
    ids, mask = random_prompts(model, args.rows, args.prompt)
    lengths = {"gen_length": args.length, "block_length": args.block, "steps": args.steps}
    sample = functools.partial(rollout, model, ids, mask, mask_token_id=MASK, **lengths)
    contestants = {"recomputed": functools.partial(sample, recompute=True), "cached": sample}
    tokens = {name: run().forward_tokens.double().mean().item() for name, run in contestants.items()}
    work = {name: multiply_adds(run) for name, run in contestants.items()}
    results = race(contestants, args.repeats, base="recomputed", warm=True)
    for name, row in results.items():
        row |= {"tokens per row": tokens[name], "tokens / recomputed": tokens[name] / tokens["recomputed"]}
        row["multiply-adds / recomputed"] = work[name] / work["recomputed"]
    return {"results": results}


def race_scoring(args: argparse.Namespace) -> dict[str, Any]:
    """Old log-probs under mu masks without gradients, then one inner update's log-probs with them."""
    tasks = ways(random_model(args.size), args)
    results: dict[str, dict[str, float]] = {}
    for task, title in (("scoring", "mu masks"), ("update", "update")):
        runs = {f"{way}, {title}": run for way, run in tasks[task].items()}
        results |= race(runs, args.repeats, base=f"published, {title}")
    return {"results": results}


def measure_memory(args: argparse.Namespace) -> dict[str, Any]:
    """Peak bytes of sampling, greedy and at a temperature, and of scoring under mu masks, in both ways."""
    model = random_model(args.size)
    results: dict[str, dict[str, float]] = {}
    blocks = -(-args.length // args.block)
    tasks = {
        "sampler": ways(model, args, steps=blocks)["rollout"],
        "sampler, drawing": ways(model, args, steps=blocks, temperature=0.9)["rollout"],
        "scoring": ways(model, args)["scoring"],
    }
    for task, runs in tasks.items():
        theirs, ours = map(peak_bytes, runs.values())
        results[task] = {"published": theirs, "ours": ours, "published / ours": theirs / ours}
    return {"results": results, "remarks": ["Peak bytes, beyond the weights."]}


def make_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=list(BENCHMARKS))
    parser.add_argument("--size", choices=list(SIZES), default="pocket")
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--rows", type=int, default=2)
    parser.add_argument("--prompt", type=int, default=64, help="tokens of the prompt")
    parser.add_argument("--length", type=int, default=64, help="tokens of the canvas")
    parser.add_argument("--block", type=int, default=32)
    parser.add_argument("--steps", type=int, default=32)
    parser.add_argument("--mu", type=int, default=4, help="masks, and updates on a rollout")
    parser.add_argument("--compile", action="store_true", help="gpu: also with torch.compile, which takes minutes")
    parser.add_argument("--output_dir", default="benchmark_results")
    return parser


# The benchmark, and the settings that matter to it beyond those that matter to all.
BENCHMARKS: dict[str, tuple[Callable[[argparse.Namespace], dict[str, Any]], tuple[str, ...]]] = {
    "sampler": (race_samplers, ("block", "steps")),
    "blocks": (race_blocks, ("block", "steps")),
    "scoring": (race_scoring, ("mu",)),
    "memory": (measure_memory, ("block", "mu")),
    "rl": (steps.race_steps, ("block", "steps", "mu")),
    "sft": (steps.race_steps, ("mu",)),
    "methods": (steps.race_methods, ("block", "steps", "mu")),
    "gpu": (gpu.race_gpu, ("block", "steps", "mu", "compile")),
}


def check_race(args: argparse.Namespace) -> None:
    """Raises ValueError for a race that makes no sense, before a model is built."""
    check_counts(args, "repeats", "rows", "prompt", "length", "block", "steps", "mu")
    what, matters = args.what, BENCHMARKS[args.what][1]
    if "steps" in matters:
        reveal_schedule(args.length, args.block, args.steps)
    if "block" in matters and args.block > args.length:
        raise ValueError(f"--block {args.block} is longer than the canvas, --length {args.length}")
    if args.compile and "compile" not in matters:
        raise ValueError(f"--compile is for the benchmark gpu: {what} would ignore it")
    if what not in ("rl", "sft", "methods"):
        return
    if what != "sft" and args.length % args.block:
        raise ValueError(f"{what}: --length {args.length} must be a multiple of --block {args.block}")
    if what != "sft" and (args.rows < 2 or args.rows % group_size(args.rows)):
        raise ValueError(f"{what}: --rows {args.rows} do not split into equal groups of about 8; try a multiple of 8")
    if args.size != "pocket" and (args.prompt < 2 or args.length < 8):
        raise ValueError(f"{what}: rows need --prompt 2 or more and --length 8 or more, for a word on either side")
    if args.size == "pocket" and args.prompt < POCKET_PROMPT:
        raise ValueError(f"the pocket model's prompts have {POCKET_PROMPT} tokens, got --prompt {args.prompt}")


def main(args: argparse.Namespace) -> None:
    check_race(args)
    Path(args.output_dir).mkdir(parents=True, exist_ok=True)
    run, matters = BENCHMARKS[args.what]
    settings = {key: getattr(args, key) for key in ("size", "repeats", "rows", "prompt", "length", *matters)}
    report = {"machine": describe(), "settings": settings} | run(args)
    write_report(report, args.output_dir, f"{args.what}_{args.size}")


if __name__ == "__main__":
    run_script("bench.py", lambda: main(make_parser().parse_args()))
