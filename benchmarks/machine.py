"""What a call costs on this machine: fair races, multiplications, peak memory; and which machine it is."""

from __future__ import annotations

import os
import statistics
import time
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch.profiler import ProfilerActivity, profile
from torch.utils.flop_counter import FlopCounterMode

from d1.runs.record import cpu_model


def describe() -> dict[str, Any]:
    """The machine: processor model, cores, threads, GPU."""
    machine = {"processor": cpu_model(), "cores": os.cpu_count(), "threads": torch.get_num_threads()}
    machine |= {"PyTorch": torch.__version__}
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
    contestants: Mapping[str, Callable[[], Any]], repeats: int, base: str, clocked: bool = False, warm: bool = False
) -> dict[str, dict[str, float]]:
    """Times the contestants against each other, in one process, each round in the opposite order of the last.

    Every contestant runs once before the first round, unless all are `warm`. Ratios are taken within a round, against
    `base`: of processor seconds on a CPU, which its other users disturb less than the clock, and of the clock on a GPU.
    With `clocked` the contestants return their own (wall, processor) seconds.
    """
    if not warm:
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


def multiply_adds(run: Callable[[], Any]) -> int:
    """Multiplications, each with an addition, in the matrix products of a call; on a CPU all but attention's own."""
    counter = FlopCounterMode(display=False)
    with counter:
        run()
    return counter.get_total_flops() // 2


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


def check_counts(args: Any, *names: str) -> None:
    """Raises ValueError for a setting among `names` that is not positive."""
    for name in names:
        if getattr(args, name) < 1:
            raise ValueError(f"--{name} must be at least 1, got {getattr(args, name)}")
