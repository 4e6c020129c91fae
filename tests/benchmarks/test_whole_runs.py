"""Every processor second of a phase has a row, and those around the work are told from those inside passes."""

import argparse
import json
from pathlib import Path

import pytest

from benchmarks import saving
from benchmarks.clock import Clock
from benchmarks.rl_steps import rl_trainer
from benchmarks.whole_runs import PASSES, REST, ROWS, START, main, make_parser, shares


def test_shares_are_of_all_seconds():
    seconds = {START: 30.0, "rollout": 2.0, f"rollout{PASSES}": 40.0, "optimizer": 3.0, f"logging{PASSES}": 5.0}
    found = {"seconds": 80.0, "inside passes, %": 56.25, "beside passes, %": 6.25, "around the work, %": 37.5}
    assert shares(seconds) == found


def test_a_whole_evaluation_is_divided_into_rows(tmp_path, capsys):
    main(make_parser().parse_args(["--only", "evaluation", "--miniature", "--output_dir", str(tmp_path)]))
    written = json.loads((tmp_path / "whole_runs.json").read_text())
    table, whole = written["processor seconds"], written["shares"]["evaluation"]
    assert list(table) == [*ROWS]
    assert sum(sum(row.values()) for row in table.values()) == pytest.approx(whole["seconds"])
    assert {name for name, row in table.items() if row["evaluation"] > 0.001} >= {START, REST, "model", "rollout"}
    inside = {name: row[f"evaluation{PASSES}"] for name, row in table.items()}
    assert inside.pop("rollout") > 0.05
    assert not any(inside.values())


def test_a_checkpoint_is_saved_after_each_step_and_is_no_part_of_a_step(tmp_path):
    clock = Clock()
    shape = argparse.Namespace(size="tiny", rows=4, prompt=6, length=8, block=4, steps=4, mu=2)
    found = saving.cost(rl_trainer(shape, tmp_path, clock), clock, 100)
    [folder] = tmp_path.glob("checkpoint-2")
    assert found["GB"] * 1e9 == sum(Path(file).stat().st_size for file in folder.iterdir())
    assert found["checkpoint seconds"] == clock.wall["checkpoint"] / 2
    share = found["checkpoint seconds"] / (found["checkpoint seconds"] + 100 * found["step seconds"])
    assert found["share, %"] == pytest.approx(100 * share)
