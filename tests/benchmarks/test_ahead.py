"""The measurement of rollouts ahead: its interval, and one real pair of runs."""

from __future__ import annotations

import math
import os
import re
import subprocess
import sys

import pytest

from benchmarks import ahead
from benchmarks.machine import address_of


def test_the_interval_of_a_ratio_is_that_of_the_mean_logarithm():
    """Ratios 1/2 and 1/8: the logarithms' mean is -2 log 2, their deviation sqrt(2) log 2, and t(1) at .975 12.706."""
    mean, low, high = ahead.ratio_interval([1.0, 2.0], [2.0, 16.0])
    assert mean == pytest.approx(1 / 4)
    assert math.log(high / mean) == pytest.approx(12.7062 * math.log(2), rel=1e-4)
    assert math.log(mean / low) == pytest.approx(12.7062 * math.log(2), rel=1e-4)


def started(code: str) -> subprocess.Popen[str]:
    return subprocess.Popen([sys.executable, "-c", f"import sys\n{code}"], stderr=subprocess.PIPE, text=True)


def test_a_server_that_writes_much_after_its_address_is_not_stopped_by_a_full_pipe():
    server = started("print('a warning', 'Serving m on http://127.0.0.1:80', 'x' * 10**6, sep='\\n', file=sys.stderr)")
    assert address_of(server) == "http://127.0.0.1:80"
    assert server.wait(timeout=30) == 0


def test_a_server_that_ends_before_it_listens_is_an_error_with_its_reason():
    server = started("sys.exit('serve: there is no FastAPI')")
    with pytest.raises(OSError, match=r"ended before it listened: serve: there is no FastAPI$"):
        address_of(server)
    assert server.wait(timeout=30) == 1


def test_a_run_that_fails_is_an_error_with_its_reason(tmp_path):
    core = min(os.sched_getaffinity(0))
    with pytest.raises(OSError, match=r"(?s)a run failed: .*--rollout_staleness -1"):
        ahead.training_seconds(tmp_path, "http://127.0.0.1:1", steps=1, staleness=-1, core=core)


@pytest.mark.slow
def test_a_pair_of_runs_gives_a_ratio(capsys):
    ahead.main(ahead.make_parser().parse_args(["--pairs", "2", "--steps", "3"]))
    assert re.search(r"one ahead / in turn: [\d.]+ \[[\d.]+, [\d.]+\] of the seconds\n$", capsys.readouterr().out)
