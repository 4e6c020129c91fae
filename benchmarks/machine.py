"""What the benchmarks share: models of random weights, fair races, peak memory, the machine's description."""

from __future__ import annotations

import os
import platform
import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch.profiler import ProfilerActivity, profile
from transformers import LlamaConfig, LlamaForCausalLM

from d1.models import attach_hooks

MASK = 3
SIZES = {  # vocabulary, hidden, feed-forward, layers, heads
    "tiny": (2048, 32, 64, 2, 4),
    "pocket": (128, 64, 192, 4, 4),
    "60m": (26_000, 512, 2048, 8, 8),
    "wide": (126_464, 64, 128, 1, 4),  # LLaDA's vocabulary on next to no body: for the memory of logits
    "goal": (126_464, 512, 2048, 8, 8),
}


def random_model(size: str, vocabulary: int | None = None) -> Any:
    """A bidirectional Llama of a size in `SIZES`, with random weights."""
    default, hidden, feed_forward, layers, heads = SIZES[size]
    config = LlamaConfig(  # type: ignore[call-arg]
        vocab_size=vocabulary or default,
        hidden_size=hidden,
        intermediate_size=feed_forward,
        num_hidden_layers=layers,
        num_attention_heads=heads,
        num_key_value_heads=heads,
        max_position_embeddings=4096,
        pad_token_id=0,
        bos_token_id=1,
        eos_token_id=2,
        is_causal=False,
    )
    torch.manual_seed(0)
    model: Any = attach_hooks(LlamaForCausalLM(config))
    device = "cuda" if torch.cuda.is_available() else "cpu"
    return model.to(device, torch.bfloat16 if device == "cuda" else torch.float32).eval()


def random_prompts(model: Any, rows: int, length: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Ids and attention mask (rows, length), without padding or special tokens."""
    generator = torch.Generator().manual_seed(1)
    ids = torch.randint(4, model.config.vocab_size, (rows, length), generator=generator).to(model.device)
    return ids, torch.ones_like(ids)


def describe() -> dict[str, Any]:
    """The machine: processor model, cores, threads, GPU."""
    model = platform.processor()
    if Path("/proc/cpuinfo").is_file():
        lines = Path("/proc/cpuinfo").read_text().splitlines()
        model = next((line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")), model)
    machine = {"cpu": model, "cores": os.cpu_count(), "threads": torch.get_num_threads(), "torch": torch.__version__}
    return machine | ({"gpu": torch.cuda.get_device_name()} if torch.cuda.is_available() else {})


def now() -> tuple[float, float]:
    """(wall, processor) clocks, once the GPU has done what it was given."""
    if torch.cuda.is_available():
        torch.cuda.synchronize()
    return time.perf_counter(), time.process_time()


def seconds(run: Callable[[], Any]) -> tuple[float, float]:
    """(wall, processor) seconds of one call."""
    wall, cpu = now()
    run()
    after = now()
    return after[0] - wall, after[1] - cpu


def race(
    contestants: dict[str, Callable[[], Any]], repeats: int, base: str, clocked: bool = False
) -> dict[str, dict[str, float]]:
    """Times the contestants against each other, in one process, each round in the opposite order of the last.

    Every contestant runs once before the first round. Ratios are taken within a round, against `base`: of processor
    seconds on a CPU, which its other users disturb less than the clock, and of the clock on a GPU. With `clocked` the
    contestants return their own (wall, processor) seconds.
    """
    for run in contestants.values():
        run()
    times: dict[str, list[tuple[float, float]]] = {name: [] for name in contestants}
    for number in range(repeats):
        for name in list(contestants)[:: 1 if number % 2 == 0 else -1]:
            times[name].append(contestants[name]() if clocked else seconds(contestants[name]))
    kind = 0 if torch.cuda.is_available() else 1
    results = {}
    for name, measured in times.items():
        ratios = [mine[kind] / other[kind] for mine, other in zip(measured, times[base], strict=True)]
        results[name] = {
            "wall_seconds": statistics.median(wall for wall, _ in measured),
            "cpu_seconds": statistics.median(cpu for _, cpu in measured),
            "ratio": statistics.median(ratios),
            "ratio_low": min(ratios),
            "ratio_high": max(ratios),
        }
    return results


def peak_bytes(run: Callable[[], Any]) -> int:
    """The most bytes the allocator held during a call, beyond those before it; temporaries inside an op included."""
    if torch.cuda.is_available():
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        run()
        return torch.cuda.max_memory_allocated() - before
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as recorded:
        run()
    events: Any = recorded.profiler.kineto_results.events()  # type: ignore[union-attr]
    changes = sorted((e.start_ns(), e.nbytes()) for e in events if e.name() == "[memory]")
    held = peak = 0
    for _, change in changes:
        held += change
        peak = max(peak, held)
    return peak
