"""python -m benchmarks.bench WHAT [--size goal] [--output_dir DIR]

Races this library against the published way (`benchmarks/published.py`) and the bare transformer, side by side in one
process, and writes `DIR/<what>_<size>.json` and `.md`.

    sampler   one rollout: published, ours, another library's (`--peer FILE.py`), and the body's forward passes alone
    blocks    one rollout of a block-causal model: over its cache, and computing everything in each step
    scoring   old log-probs under mu masks; one update (loss and gradients)
    memory    peak bytes of both, measured, beside the formulas, and what these say at LLaDA-8B's size
    rl, sft, sft_blocks, sft_lengths
              whole optimizer steps of the real trainers by phase (`benchmarks/steps.py`): mu of them, on one rollout
    methods   every RL method: a rollout and its updates, at most mu of them, beside its bare passes
    gpu       LLaDA-8B's shape with LoRA: rollout, scoring, update, compiled and not, with flash attention and without

A peer is a Python file with `generate(model, prompt_ids, attention_mask, *, mask_token_id, gen_length, block_length,
steps)` that returns (rows, prompt + gen_length) ids. Set OMP_NUM_THREADS=1 to measure one thread.
"""

from __future__ import annotations

import argparse
import functools
import importlib.util
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from benchmarks import gpu, methods, published
from benchmarks.machine import check_counts, describe, multiply_adds, peak_bytes, race
from benchmarks.random_models import MASK, SIZES, our_scores, random_model, random_prompts, scoring_inputs, update
from benchmarks.reports import write_report
from benchmarks.rl_steps import POCKET_PROMPT, group_size
from benchmarks.steps import race_steps
from d1 import sampling
from d1.models import head
from d1.models.head import body_and_head
from d1.runs.entry import run_script
from d1.sampling.reveal import reveal_schedule

LLADA_VOCABULARY, D1 = SIZES["llada"][0], {"rows": 6, "mu": 12, "prompt": 200, "length": 256, "block": 32}


def load_peer(path: str) -> Callable[..., torch.Tensor]:
    spec = importlib.util.spec_from_file_location("peer", path)
    if spec is None or spec.loader is None or not Path(path).is_file():
        raise ValueError(f"--peer {path} is not a Python file")
    module = sys.modules["peer"] = importlib.util.module_from_spec(spec)  # where dataclasses look for it
    spec.loader.exec_module(module)
    if not callable(getattr(module, "generate", None)):
        raise ValueError(f"--peer {path} has no function `generate`")
    return module.generate


def check_peer(peer: Callable[..., torch.Tensor], args: argparse.Namespace, options: dict[str, Any]) -> None:
    """Raises ValueError for a peer that does not fill the canvas of a tiny model: it would win without the work."""
    model = random_model("tiny")
    ids, mask = random_prompts(model, args.rows, args.prompt)
    found: Any = peer(model, ids, mask, **options)
    wanted = (args.rows, args.prompt + args.length)
    if not isinstance(found, torch.Tensor) or found.shape != wanted:
        given = tuple(found.shape) if isinstance(found, torch.Tensor) else type(found).__name__
        raise ValueError(f"--peer {args.peer}: `generate` must return a tensor of ids {wanted}, got {given}")
    if not torch.equal(found[:, : args.prompt], ids):
        raise ValueError(f"--peer {args.peer}: the ids that `generate` returns must begin with the prompt's")
    if (found == MASK).any():
        raise ValueError(f"--peer {args.peer}: `generate` left {int((found == MASK).sum())} tokens masked")


def race_samplers(args: argparse.Namespace) -> dict[str, Any]:
    """One greedy rollout each, against the body's forward passes alone."""
    lengths = {"gen_length": args.length, "block_length": args.block, "steps": args.steps}
    options: dict[str, Any] = {"mask_token_id": MASK, **lengths}
    peer = load_peer(args.peer) if args.peer else None
    if peer is not None:
        check_peer(peer, args, options)
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
    if peer is not None:
        contestants["peer"] = lambda: peer(model, ids, mask, **options)
    work = {name: multiply_adds(run) for name, run in contestants.items()}
    results = race(contestants, args.repeats, base="bare body", warm=True)
    for name, row in results.items():
        row["multiply-adds / bare"] = work[name] / work["bare body"]
    return {"results": results}


def race_blocks(args: argparse.Namespace) -> dict[str, Any]:
    """A model whose own blocks have `block` tokens: time, tokens fed through its body, and multiplications."""
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
        row |= {"tokens a row": tokens[name], "tokens / recomputed": tokens[name] / tokens["recomputed"]}
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


def published_sampler_bytes(rows: int, tokens: int, vocabulary: int, width: int) -> int:
    """Logits and probabilities of every position, greedy, `width` bytes a number."""
    return 2 * rows * tokens * vocabulary * width


def our_sampler_bytes(rows: int, block: int, vocabulary: int) -> int:
    """fp32 logits of a chunk of hidden positions, and either the model's own or the exponentials of logsumexp."""
    at_once = max(1, head.CHUNK_ELEMENTS // 2 // vocabulary)
    positions = min(rows, max(1, at_once // block)) * min(block, at_once)
    return positions * vocabulary * (4 + 4)


def published_scoring_bytes(rows: int, mu: int, prompt: int, length: int, vocabulary: int, width: int) -> int:
    """Logits of every position under all masks, the completion's copied together, and their log-softmax."""
    return rows * mu * vocabulary * width * (prompt + length + 2 * length)


def our_scoring_bytes(rows: int, length: int, vocabulary: int) -> int:
    """One chunk: fp32 logits, and either the model's own or the exponentials of logsumexp."""
    return min(rows * length, max(1, head.CHUNK_ELEMENTS // vocabulary)) * vocabulary * (4 + 4)


def measure_memory(args: argparse.Namespace) -> dict[str, Any]:
    """Peak bytes at a size that fits, beside the formulas; then the formulas for LLaDA-8B in bf16 at d1's settings."""
    model = random_model(args.size)
    inputs = scoring_inputs(model, args)
    ids, mask = inputs[:2]
    options: dict[str, Any] = {"mask_token_id": MASK, "gen_length": args.length, "block_length": args.block}
    options["steps"] = -(-args.length // args.block)
    with torch.no_grad():
        measured = {
            "sampler": (
                peak_bytes(lambda: published.generate(model, ids, mask, **options)),
                peak_bytes(lambda: sampling.generate(model, ids, mask, **options)),
            ),
            # What our formula speaks of; the published one is that of greedy tokens, its least.
            "sampler, drawing": (
                peak_bytes(lambda: published.generate(model, ids, mask, temperature=0.9, **options)),
                peak_bytes(lambda: sampling.generate(model, ids, mask, temperature=0.9, **options)),
            ),
            "scoring": (
                peak_bytes(lambda: published.score(model, *inputs, mask_token_id=MASK)),
                peak_bytes(lambda: our_scores(model, *inputs)),
            ),
        }
    here = {"rows": args.rows, "mu": args.mu, "prompt": args.prompt, "length": args.length, "block": args.block}
    width = next(model.parameters()).element_size()
    results = {}
    for name, (theirs, ours) in measured.items():
        results[f"{name}, measured"] = {"published": theirs, "ours": ours, "published / ours": theirs / ours}
    for name in ("sampler", "scoring"):
        results[f"{name}, formula"] = formula_bytes(name, here, model.config.vocab_size, width)
        results[f"{name}, LLaDA-8B by formula"] = formula_bytes(name, D1, LLADA_VOCABULARY, 2)
    return {"results": results, "remarks": ["Peak bytes, beyond the weights."]}


def race_whole_steps(args: argparse.Namespace) -> dict[str, Any]:
    with tempfile.TemporaryDirectory() as folder:
        return race_steps(args.what, args, Path(folder))


def formula_bytes(name: str, at: dict[str, int], vocabulary: int, width: int) -> dict[str, float]:
    rows, mu, prompt, length, block = (at[key] for key in ("rows", "mu", "prompt", "length", "block"))
    if name == "sampler":
        theirs = published_sampler_bytes(rows, prompt + length, vocabulary, width)
        ours = our_sampler_bytes(rows, block, vocabulary)
    else:
        theirs = published_scoring_bytes(rows, mu, prompt, length, vocabulary, width)
        ours = our_scoring_bytes(rows, length, vocabulary)
    return {"published": theirs, "ours": ours, "published / ours": theirs / ours}


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
    parser.add_argument("--peer", help="Python file with another library's sampler")
    parser.add_argument("--output_dir", default="benchmark_results")
    return parser


BENCHMARKS: dict[str, Callable[[argparse.Namespace], dict[str, Any]]] = {
    "sampler": race_samplers,
    "blocks": race_blocks,
    "scoring": race_scoring,
    "memory": measure_memory,
    "rl": race_whole_steps,
    "sft": race_whole_steps,
    "sft_blocks": race_whole_steps,
    "sft_lengths": race_whole_steps,
    "methods": methods.race_methods,
    "gpu": gpu.race_gpu,
}
MATTERS = {  # settings beyond those that matter to all
    "sampler": ("block", "steps"),
    "blocks": ("block", "steps"),
    "scoring": ("mu",),
    "memory": ("block", "mu"),
    "rl": ("block", "steps", "mu"),
    "sft": ("mu",),
    "sft_blocks": ("block", "mu"),
    "sft_lengths": ("mu",),
    "methods": ("block", "steps", "mu"),
    "gpu": ("block", "steps", "mu", "compile"),
}


def check_race(args: argparse.Namespace) -> None:
    """Raises ValueError for a race that makes no sense, before a model is built."""
    check_counts(args, "repeats", "rows", "prompt", "length", "block", "steps", "mu")
    matters = MATTERS[args.what]
    if "steps" in matters:
        reveal_schedule(args.length, args.block, args.steps)
    if "block" in matters and args.block > args.length:
        raise ValueError(f"--block {args.block} is longer than the canvas, --length {args.length}")
    for name, benchmark in (("peer", "sampler"), ("compile", "gpu")):
        if getattr(args, name) and args.what != benchmark:
            raise ValueError(f"--{name} is for the benchmark {benchmark}: {args.what} would ignore it")
    if args.what in ("rl", "methods") and args.length % args.block:
        raise ValueError(f"{args.what}: --length {args.length} must be a multiple of --block {args.block}")
    if args.what in ("rl", "methods") and (args.rows < 2 or args.rows % group_size(args.rows)):
        raise ValueError(
            f"{args.what}: --rows {args.rows} do not split into equal groups of about 8; try a multiple of 8"
        )
    if args.what not in ("rl", "sft", "sft_blocks", "sft_lengths", "methods"):
        return
    if args.size != "pocket" and (args.prompt < 2 or args.length < 8):
        raise ValueError(f"{args.what}: rows need --prompt 2 or more and --length 8 or more, for a word on either side")
    if args.size == "pocket" and args.prompt < POCKET_PROMPT:
        raise ValueError(f"the pocket model's prompts have {POCKET_PROMPT} tokens, got --prompt {args.prompt}")


def main(args: argparse.Namespace) -> None:
    check_race(args)
    Path(args.output_dir).mkdir(parents=True, exist_ok=True)
    settings = {key: getattr(args, key) for key in ("size", "repeats", "rows", "prompt", "length", *MATTERS[args.what])}
    settings |= {"peer": args.peer} if args.peer else {}
    report = {"machine": describe(), "settings": settings} | BENCHMARKS[args.what](args)
    write_report(report, args.output_dir, f"{args.what}_{args.size}")


if __name__ == "__main__":
    run_script("bench.py", lambda: main(make_parser().parse_args()))
