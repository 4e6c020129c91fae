"""How many processors this process may use."""

from __future__ import annotations

import os


def available_cpus() -> int:
    """Processors that this process may run on: a job of Slurm, or `taskset`, may have fewer than the machine."""
    if hasattr(os, "sched_getaffinity"):  # Linux
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1
