"""The measurement of rollouts ahead: its interval, and one real pair of runs."""

from __future__ import annotations

import math
import re

import pytest

from benchmarks import ahead


def test_the_interval_of_a_ratio_is_that_of_the_mean_logarithm():
    """Ratios 1/2 and 1/8: the logarithms' mean is -2 log 2, their deviation sqrt(2) log 2, and t(1) at .975 12.706."""
    mean, low, high = ahead.ratio_interval([1.0, 2.0], [2.0, 16.0])
    assert mean == pytest.approx(1 / 4)
    assert math.log(high / mean) == pytest.approx(12.7062 * math.log(2), rel=1e-4)
    assert math.log(mean / low) == pytest.approx(12.7062 * math.log(2), rel=1e-4)


@pytest.mark.slow
def test_a_pair_of_runs_gives_a_ratio(capsys):
    ahead.main(ahead.make_parser().parse_args(["--pairs", "2", "--steps", "3"]))
    assert re.search(r"one ahead / in turn: [\d.]+ \[[\d.]+, [\d.]+\] of the seconds\n$", capsys.readouterr().out)
