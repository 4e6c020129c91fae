"""Work is shared among the processors of the job, not of the machine."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

from d1.cpus import available_cpus

PROGRAM = "import os; os.sched_setaffinity(0, {cpus}); from d1.sandbox import WORKERS; from d1.cpus import "
PROGRAM += "available_cpus; print(available_cpus(), WORKERS)"


def counts(cpus: set[int], **environment: str) -> list[int]:
    """The processors that a process with this affinity may use, and the programs that it judges at a time."""
    command = [sys.executable, "-c", PROGRAM.format(cpus=cpus)]
    return [*map(int, subprocess.check_output(command, env=os.environ | environment, text=True).split())]


@pytest.mark.skipif(not hasattr(os, "sched_setaffinity"), reason="Linux has an affinity")
def test_a_process_counts_the_processors_of_its_affinity_and_shares_them_with_others_of_its_launch() -> None:
    every = os.sched_getaffinity(0)
    assert available_cpus() == len(every)
    assert counts({min(every)}) == [1, 1]
    assert counts(every, LOCAL_WORLD_SIZE=str(len(every))) == [len(every), 1]
    assert counts(every, LOCAL_WORLD_SIZE="1000") == [len(every), 1]  # one program is always judged
