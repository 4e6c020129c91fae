"""One GPU at d1's settings: LLaDA-8B's shape, random weights in bf16, a LoRA adapter, against the published way.

A way that runs out of memory, or that the compiler fails on, is left out and named below the table.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

import torch
import torch._dynamo
from peft import LoraConfig, get_peft_model
from torch.nn.attention import SDPBackend, sdpa_kernel

from benchmarks.machine import peak_bytes, race
from benchmarks.random_models import random_model, ways

APPROXIMATE = ("cached", "parallel", "cached+parallel")
TEMPERATURE = 0.9  # d1's, of the rollouts
FAILURES = (torch.OutOfMemoryError, torch._dynamo.exc.TorchDynamoException, torch._dynamo.exc.FailOnRecompileLimitHit)
WITHOUT_FLASH = [SDPBackend.EFFICIENT_ATTENTION, SDPBackend.MATH]


@contextlib.contextmanager
def compiled(model: Any) -> Iterator[None]:
    """The body compiled in place; afterwards as it was.

    All ways share its code, and want more versions of it than the eight after which PyTorch would go on uncompiled
    without an error.
    """
    body = model.get_base_model().base_model
    body.compile()
    try:
        with torch._dynamo.config.patch(recompile_limit=64, fail_on_recompile_limit_hit=True):
            yield
    finally:
        body._compiled_call_impl = None
        torch.compiler.reset()


def that_run(runs: dict[str, Callable[[], Any]], model: Any) -> tuple[dict[str, Callable[[], Any]], dict[str, str]]:
    """The ways that run here, warmed up, and what stopped the others."""
    stopped = {}
    for way, run in runs.items():
        try:
            run()
        except FAILURES as error:
            stopped[way] = f"{type(error).__name__}: {(str(error).strip() or 'no message').splitlines()[0]}"
        if way in stopped:  # only now does the error hold the tensors of its frames no more
            model.zero_grad()
            torch.cuda.empty_cache()
    return {way: run for way, run in runs.items() if way not in stopped}, stopped


def race_gpu(args: Any) -> dict[str, Any]:
    """Rollout, log-probs under mu masks and one update, with flash attention, without it, and compiled."""
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
    weights = sum(weight.numel() * weight.element_size() for weight in model.parameters())
    remarks = [f"- Rollouts at temperature {TEMPERATURE}. Peak GB: beyond the weights' {weights / 1e9:.4g}."]
    for mode, context in modes.items():
        with context():
            for task, runs in ways(model, args, ("exact", *APPROXIMATE), seeded=True, temperature=TEMPERATURE).items():
                running, stopped = that_run(runs, model)
                remarks += [f"- {task}, {way}, {mode}, stopped by {why}" for way, why in stopped.items()]
                if not running:
                    continue
                against = "published" if "published" in running else next(iter(running))
                timed = race(running, args.repeats, against, warm=True)
                for way, row in timed.items():
                    tokens = args.rows * args.length * (args.mu if task == "scoring" else 1)
                    row["tokens_per_second"] = tokens / row["wall_seconds"]
                    row["peak_gb"] = peak_bytes(runs[way]) / 1e9
                    results[f"{task}, {way}, {mode}"] = row
    return {"results": results, "remarks": remarks}
