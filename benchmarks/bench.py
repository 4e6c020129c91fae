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
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from benchmarks import gpu, methods, published
from benchmarks.machine import check_counts, describe, multiply_adds, peak_bytes, race
from benchmarks.random_models import MASK, SIZES, our_scores, random_model, random_prompts, scoring_inputs, update
from benchmarks.results import write_report
from benchmarks.rl_steps import POCKET_PROMPT, group_size
from benchmarks.steps import race_steps
from d1 import sampling
from d1.models.head import body_and_head
from d1.runs.entry import run_script
from d1.sampling.reveal import reveal_schedule


def race_samplers(args: argparse.Namespace) -> dict[str, Any]:
    """One greedy rollout each, against the transformer's forward passes alone."""
    lengths = {"gen_length": args.length, "block_length": args.block, "steps": args.steps}
    options: dict[str, Any] = {"mask_token_id": MASK, **lengths}
    model = random_model(args.size)
    ids, mask = random_prompts(model, args.rows, args.prompt)
    body, _ = body_and_head(model)
    canvas = torch.cat([ids, torch.full((args.rows, args.length), MASK, device=ids.device)], dim=1)

    @torch.no_grad()
    def bare() -> None:
        for _ in range(args.steps):
            body(canvas, None)

    contestants: dict[str, Callable[[], Any]] = {
        "bare body": bare,
        "exact": lambda: sampling.generate(model, ids, mask, **options),
        "published": lambda: published.generate(model, ids, mask, **options),
    }
    work = {name: multiply_adds(run) for name, run in contestants.items()}
    results = race(contestants, args.repeats, base="bare body", warm=True)
    for name, row in results.items():
        row["multiply-adds / bare"] = work[name] / work["bare body"]
    return {"results": results}


def race_blocks(args: argparse.Namespace) -> dict[str, Any]:
    """A model whose own blocks have `block` tokens: time, tokens fed through the transformer, and multiplications."""
    model = random_model(args.size, block_size=args.block)
    ids, mask = random_prompts(model, args.rows, args.prompt)
    options: dict[str, Any] = {"mask_token_id": MASK, "gen_length": args.length, "block_length": args.block}
    options["steps"] = args.steps

    def sample(recompute: bool) -> sampling.Rollout:
        return sampling.rollout(model, ids, mask, recompute=recompute, **options)

    contestants = {"recomputed": lambda: sample(True), "cached": lambda: sample(False)}
    tokens = {name: run().forward_tokens.double().mean().item() for name, run in contestants.items()}
    work = {name: multiply_adds(run) for name, run in contestants.items()}
    results = race(contestants, args.repeats, base="recomputed", warm=True)
    for name, row in results.items():
        row |= {"tokens per row": tokens[name], "tokens / recomputed": tokens[name] / tokens["recomputed"]}
        row["multiply-adds / recomputed"] = work[name] / work["recomputed"]
    return {"results": results}


def race_scoring(args: argparse.Namespace) -> dict[str, Any]:
    """Old log-probs under mu masks without gradients, then one inner update's log-probs with them."""
    model = random_model(args.size)
    inputs = scoring_inputs(model, args)
    theirs: Callable[..., torch.Tensor] = functools.partial(published.score, mask_token_id=MASK)
    old = race(
        {
            "published, mu masks": torch.no_grad()(lambda: theirs(model, *inputs)),
            "ours, mu masks": torch.no_grad()(lambda: our_scores(model, *inputs)),
        },
        args.repeats,
        base="published, mu masks",
    )
    new = race(
        {
            "published, update": lambda: update(model, theirs, inputs),
            "ours, update": lambda: update(model, our_scores, inputs),
        },
        args.repeats,
        base="published, update",
    )
    return {"results": old | new}


def measure_memory(args: argparse.Namespace) -> dict[str, Any]:
    """Peak bytes of sampling, greedy and at a temperature, and of scoring under mu masks, in both ways."""
    model = random_model(args.size)
    inputs = scoring_inputs(model, args)
    options: dict[str, Any] = {"mask_token_id": MASK, "gen_length": args.length, "block_length": args.block}
    options["steps"] = -(-args.length // args.block)
    results = {}
    for name, temperature in (("sampler", 0.0), ("sampler, drawing", 0.9)):
        ways = [
            functools.partial(way.generate, model, *inputs[:2], temperature=temperature, **options)
            for way in (published, sampling)
        ]
        results[name] = [peak_bytes(way) for way in ways]
    with torch.no_grad():
        theirs = peak_bytes(lambda: published.score(model, *inputs, mask_token_id=MASK))
        results["scoring"] = [theirs, peak_bytes(lambda: our_scores(model, *inputs))]
    return {
        "results": {
            name: {"published": theirs, "ours": ours, "published / ours": theirs / ours}
            for name, (theirs, ours) in results.items()
        },
        "remarks": ["Peak bytes, beyond the weights."],
    }


def race_whole_steps(args: argparse.Namespace) -> dict[str, Any]:
    with tempfile.TemporaryDirectory() as folder:
        return race_steps(args.what, args, Path(folder))


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
    "rl": (race_whole_steps, ("block", "steps", "mu")),
    "sft": (race_whole_steps, ("mu",)),
    "methods": (methods.race_methods, ("block", "steps", "mu")),
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
