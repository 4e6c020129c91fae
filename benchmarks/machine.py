"""Measure the cost of calls on this machine: times, multiplications and peak memory; describe the machine; report."""

from __future__ import annotations

import os
import re
import statistics
import subprocess
import threading
import time
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch.profiler import ProfilerActivity, profile
from torch.utils.flop_counter import FlopCounterMode

from d1.runs.record import cpu_model
from d1.runs.tables import markdown_table


def describe() -> dict[str, Any]:
    """The machine: processor model, cores, threads, GPU."""
    machine = {"processor": cpu_model(), "cores": os.cpu_count(), "threads": torch.get_num_threads()}
    gpu = {"gpu": torch.cuda.get_device_name()} if torch.cuda.is_available() else {}
    return machine | {"PyTorch": torch.__version__} | gpu


def seconds(run: Callable[[], Any]) -> tuple[float, float]:
    """(wall, processor) seconds of one call, until the GPU has finished its work."""
    started = time.perf_counter(), time.process_time()
    run()
    if torch.cuda.is_available():
        torch.cuda.synchronize()
    return time.perf_counter() - started[0], time.process_time() - started[1]


def race(contestants: Mapping[str, Callable[[], Any]], repeats: int, base: str) -> dict[str, dict[str, float]]:
    """Times the contestants in one process, in rounds of alternating order.

    Every contestant runs once before the first round. Ratios are taken within a round, to `base`: on a CPU of processor
    seconds, which other users disturb less than wall time, and on a GPU of wall time.
    """
    times: dict[str, list[tuple[float, float]]] = {name: [] for name in contestants}
    for run in contestants.values():
        seconds(run)
    for number in range(repeats):
        for name in list(contestants)[:: 1 if number % 2 == 0 else -1]:
            times[name].append(seconds(contestants[name]))
    kind = 0 if torch.cuda.is_available() else 1
    results = {}
    for name, measured in times.items():
        ratios = [mine[kind] / other[kind] for mine, other in zip(measured, times[base], strict=True)]
        wall, cpu = map(statistics.median, zip(*measured, strict=True))
        row = {"wall_seconds": wall, "cpu_seconds": cpu, "ratio": statistics.median(ratios)}
        results[name] = row | {"ratio_low": min(ratios), "ratio_high": max(ratios)}
    return results


def multiply_adds(run: Callable[[], Any]) -> int:
    """Number of multiply-adds in the matrix products of a call; on a CPU without those inside attention."""
    counter = FlopCounterMode(display=False)
    with counter:
        run()
    return counter.get_total_flops() // 2


def peak_bytes(run: Callable[[], Any]) -> int:
    """Peak bytes that the allocator held during a call, minus those before it; includes temporaries inside an op."""
    if torch.cuda.is_available():
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        run()
        return torch.cuda.max_memory_allocated() - before
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiled:
        run()
    events: Any = profiled.profiler.kineto_results.events()  # type: ignore[union-attr]
    changes = sorted((e.start_ns(), e.nbytes()) for e in events if e.name() == "[memory]")
    held = peak = 0
    for _, change in changes:
        held += change
        peak = max(peak, held)
    return peak


def address_of(server: subprocess.Popen[str]) -> str:
    """The address of a `d1 serve`, when it listens. What it writes to its stderr after that is read and dropped, so
    that a full pipe cannot stop it.

    Raises:
        OSError: the server ended before it listened; the message has what it wrote.
    """
    assert server.stderr is not None
    written = []
    for line in server.stderr:
        match = re.match(r"Serving .* on (http://\S+)$", line)
        if match:
            threading.Thread(target=server.stderr.read, daemon=True).start()
            return match[1]
        written.append(line)
    raise OSError(f"the server ended before it listened: {''.join(written)[-2000:].strip()}")


def as_markdown(rows: Mapping[str, Mapping[str, float]]) -> str:
    """A line for the machine and the table of results, where ratios have the lowest and highest of all rounds."""
    columns = [name for name in next(iter(rows.values())) if name not in ("ratio_low", "ratio_high")]

    def cell(row: Mapping[str, float], column: str) -> str:
        if column != "ratio":
            return f"{row[column]:.4g}"
        low, high = row["ratio_low"], row["ratio_high"]
        return f"{row['ratio']:.3f}" + (f" ({low:.3g} to {high:.3g})" if low < high else "")

    machine = ", ".join(f"{key} {value}" for key, value in describe().items())
    body = [[name, *(cell(row, column) for column in columns)] for name, row in rows.items()]
    return f"{machine}  \n\n{markdown_table(['', *(name.replace('_', ' ') for name in columns)], body)}"
