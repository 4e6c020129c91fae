"""The study of collapses: its arms are settings of RL, and its tests are those that the protocol names."""

import numpy as np
import pytest

from d1.rl.train import make_parser
from pocket.recipes import ROOT
from studies.collapse import report
from studies.collapse.run import ARMS, DATA, STAGES, flags_of, runs
from studies.json_lines import read_lines
from studies.samplers import rollouts


@pytest.mark.parametrize("arm", ARMS)
def test_each_arm_is_what_the_protocol_says(arm, tmp_path):
    places = ["--config", str(ROOT / "diffu-grpo" / "pocket.yaml"), "--model_path", str(ROOT), "--output_dir"]
    flags = flags_of(arm, 80, 2e-4, ["--max_steps", 96])
    args, _ = make_parser().parse_args_and_config([*places, str(tmp_path), *flags])
    sampling, merged, exact = args.sampling_settings(), arm in ("exact", "P8", "C8"), arm[-1] in "+wG"
    assert args.estimator == ("places" if exact else "replay")
    assert args.objective == ("clipped_places" if exact else "clipped_views")
    assert sampling.cache == ("prefix" if arm.startswith("C") else None)
    assert (sampling.rule, sampling.level) == ((None, 0.0) if arm == "exact" else ("threshold", 0.95))
    assert args.loss_type == ("views" if merged else "sum")
    assert not merged or args.segment_steps == 8
    assert arm not in ("P", "C") or args.segment_steps == 1
    assert (sampling.noise > 0) == (arm == "G")
    assert (args.trajectory_weight_cap is not None) == (arm == "C+w")
    assert args.num_iterations == 1


def test_collapses_are_counted_and_compared_as_registered():
    """13 against 3 of 20 is beyond chance after Holm's correction over seven tests, 6 against 1 is not."""
    bad = {"P8": 13, "P": 3, "C8": 6, "C": 1}
    lines = []
    for run in runs("test"):
        solved = 413 - (run["seed"] - 80 < bad.get(run["arm"], 0))  # of 512: 80.7% or 80.5%
        lines.append({**run, "error": None, "right": "1" * solved + "0" * (512 - solved)})
    assert len(lines) == 160
    assert report.collapsed({"error": "not finite", "right": "1" * 512})
    rows = [row.split("|")[1:-1] for row in report.verdicts(lines).splitlines()[2:]]
    found = {tuple(cell.strip() for cell in row[:3]): float(row[3]) for row in rows}
    assert found["merging", "P: 3", "P8: 13"] == pytest.approx(7 * 0.00154, rel=0.05)
    assert found["merging, with a cache", "C: 1", "C8: 6"] > 0.05
    assert rows[0][4].strip().startswith("+0.1 ")  # ten of 20 runs solve one of 512 problems more
    assert {(what, few, many) for what, few, many in report.TESTS} == {
        (what, few.split(":")[0], many.split(":")[0]) for what, few, many in found
    }
    assert {run["seed"] for run in runs("logs")} == {*range(40, 60)}
    assert not {*STAGES["rates"].seeds} & {*STAGES["test"].seeds}


def test_rollouts_without_trajectories_are_left_out_where_they_were():
    series = {"places/tokens_nll": [2.0, 0.0, 1.0, 3.0], "places/nll": [0.5, 0.0, 0.0, 0.7]}
    series |= {"places/effective": [0.9, 0.5, 0.7], "rewards/accuracy/mean": [0.1, 0.0, 0.2, 0.3]}
    line = {"series": {name: values * 16 for name, values in series.items()}}
    curves = {name: report.curve(line, name)[:4].tolist() for name in series}
    assert curves["places/nll"] == pytest.approx([0.5, np.nan, 0.0, 0.7], nan_ok=True)
    assert curves["places/effective"] == pytest.approx([0.9, np.nan, 0.5, 0.7], nan_ok=True)
    assert curves["rewards/accuracy/mean"] == [0.1, 0.0, 0.2, 0.3]
    assert report.early(line, "nll") == pytest.approx(0.4)  # of the first 32 rollouts, 24 have trajectories
    assert report.early(line, "effective") == pytest.approx(0.3)


def test_the_runs_of_logs_solve_what_those_of_the_first_study_did():
    """`--log_places` changes no update: to the problem."""
    first = {line["seed"]: line["right"]["exact"] for line in read_lines(rollouts.DATA) if line["arm"] == "prefix"}
    again = {line["seed"]: line["right"] for line in read_lines(DATA / "logs.jsonl")}
    assert {seed: first[seed] for seed in again} == again
    assert len(again) == 20
