"""The study of rollouts ahead: its arms, and the seconds on two free cores, compared with a simulated schedule."""

from __future__ import annotations

from pathlib import Path

import pytest

from d1.rl.train import make_parser as rl_parser
from studies.staleness.report import table
from studies.staleness.run import ARMS, Arm, flags_of, free_seconds, runs


def schedule(rollout, update, rollouts, staleness):
    """When the last update ends: rollout k needs the weights before update max(0, k - staleness)."""
    sampled, updated = [], []
    for number in range(rollouts):
        weights = max(0, number - staleness)
        ready = updated[weights - 1] if weights else 0.0
        sampled.append(max(ready, sampled[-1] if sampled else 0.0) + rollout)
        updated.append(max(sampled[-1], updated[-1] if updated else 0.0) + update)
    return updated[-1]


@pytest.mark.parametrize("staleness", [0, 1, 2])
@pytest.mark.parametrize("rollout", [0.25, 1.0, 4.0])
def test_seconds_on_two_free_cores_are_those_of_the_schedule(rollout, staleness):
    found = free_seconds(20 * 1.0, 20 * rollout, 20, staleness)
    assert found == pytest.approx(schedule(rollout, 1.0, 20, staleness))


def test_the_arms_differ_by_staleness_and_rollouts_alone():
    url = "http://127.0.0.1:1"
    parsed = [vars(rl_parser().parse_args_and_config(flags_of("sudoku", arm, 0, url, Path("runs")))[0]) for arm in (
        Arm(0, 24), Arm(1, 44))]  # fmt: skip
    differing = {name for name in parsed[0] if parsed[0][name] != parsed[1][name]} - {"distributed_state"}
    assert differing == {"rollout_staleness", "max_steps"}
    assert len({tuple(run.values()) for run in runs()}) == 2 * 3 * len(ARMS)


def test_the_table_pairs_seeds_and_counts_missing_runs():
    costs = {"trainer_seconds": 24.0, "server_seconds": 12.0, "clock_seconds": 99.0}
    lines = [
        {"task": "sudoku", "seed": seed, "arm": arm, "right": right, **costs}
        for seed, arm, right in ((0, "in turn", "0011"), (0, "1 ahead", "0111"), (1, "1 ahead", "1111"))
    ]
    assert "3 of 18 planned runs" in table(lines)
    found = [[cell.strip() for cell in line.split("|")] for line in table(lines).splitlines()[4:]]
    assert [row[2:4] for row in found] == [["in turn", "1"], ["1 ahead", "2"]]
    assert [row[4][:4] for row in found] == ["50.0", "87.5"]
    assert found[1][5].startswith("+25.0")  # of the seed that both have
    assert [float(row[7]) for row in found] == [36.0, pytest.approx(24 + 12 / 44, abs=0.05)]
