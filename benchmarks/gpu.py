"""One GPU at d1's settings: LLaDA-8B's shape, random weights in bf16, a LoRA adapter, against the published way."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterator
from typing import Any

import torch
from peft import LoraConfig, get_peft_model
from torch.nn.attention import SDPBackend, sdpa_kernel

from benchmarks import published
from benchmarks.machine import MASK, our_scores, peak_bytes, race, random_model, random_prompts, scoring_inputs, update
from d1 import samplers, sampling

APPROXIMATE = ("cached", "parallel", "cached+parallel")
WITHOUT_FLASH = [SDPBackend.EFFICIENT_ATTENTION, SDPBackend.MATH]


@contextlib.contextmanager
def compiled(model: Any) -> Iterator[None]:
    """The body compiled in place; afterwards as it was."""
    body = model.get_base_model().base_model
    body.compile()
    try:
        yield
    finally:
        body._compiled_call_impl = None
        torch.compiler.reset()


def contestants(model: Any, args: Any) -> dict[str, dict[str, Callable[[], Any]]]:
    """By task: the published way first, then ours."""
    ids, mask = random_prompts(model, args.rows, args.prompt)
    inputs = scoring_inputs(model, args)
    lengths = {"gen_length": args.length, "block_length": args.block, "steps": args.steps}
    sample = functools.partial(sampling.generate, model, ids, mask, mask_token_id=MASK, **lengths)
    theirs: Callable[..., torch.Tensor] = functools.partial(published.score, mask_token_id=MASK)
    rollouts: dict[str, Callable[[], Any]] = {
        "published": lambda: published.generate(model, ids, mask, mask_token_id=MASK, **lengths),
        "exact": sample,
    }
    for name in APPROXIMATE:
        rollouts[name] = functools.partial(sample, sampler=samplers.choose_sampler(name))
    return {
        "rollout": rollouts,
        "scoring": {
            "published": torch.no_grad()(lambda: theirs(model, *inputs)),
            "ours": torch.no_grad()(lambda: our_scores(model, *inputs)),
        },
        "update": {
            "published": lambda: update(model, theirs, inputs),
            "ours": lambda: update(model, our_scores, inputs),
        },
    }


def race_gpu(args: Any) -> dict[str, Any]:
    """Rollout, log-probs under mu masks and one update, with flash attention, without it, and compiled.

    Raises:
        ValueError: LLaDA-8B without a GPU.
    """
    if args.size == "llada" and not torch.cuda.is_available():
        raise ValueError(
            "no CUDA device here: LLaDA-8B's shape needs one with about 40 GB (80 GB for the published scoring at "
            "d1's settings). --size tiny runs the same code on any machine"
        )
    base = random_model(args.size)
    # LoRA as in d1's RL run; in the model's own precision, so that no autocast stands between the ways.
    config = LoraConfig(r=128, lora_alpha=64, target_modules="all-linear")
    model: Any = get_peft_model(base, config, autocast_adapter_dtype=False).eval()
    modes: dict[str, Callable[[], contextlib.AbstractContextManager]] = {
        "flash": lambda: sdpa_kernel([SDPBackend.FLASH_ATTENTION, *WITHOUT_FLASH]),
        "no flash": lambda: sdpa_kernel(WITHOUT_FLASH),
    }
    if args.compile:
        modes["compiled"] = lambda: compiled(model)
    results: dict[str, dict[str, float]] = {}
    for mode, context in modes.items():
        with context():
            for task, ways in contestants(model, args).items():
                timed = race(ways, args.repeats, base="published")
                for way, row in timed.items():
                    tokens = args.rows * args.length * (args.mu if task == "scoring" else 1)
                    row["tokens_per_second"] = tokens / row["wall_seconds"]
                    row["peak_gb"] = peak_bytes(ways[way]) / 1e9
                    results[f"{task}, {way}, {mode}"] = row
    return {"results": results}
