"""The study of collapses: its arms are settings of RL, and its tests are those that the protocol names."""

import json

import numpy as np
import pytest

from d1.rl.train import make_parser
from pocket.recipes import ROOT
from studies.collapse import report
from studies.collapse.run import ARMS, BEST, CHEAPER, DATA, RATES, SINGLE, STAGES, flags_of, runs, setting_of
from studies.json_lines import read_lines
from studies.samplers import rollouts


def arguments(arm, folder):
    places = ["--config", str(ROOT / "diffu-grpo" / "pocket.yaml"), "--model_path", str(ROOT), "--output_dir"]
    flags = flags_of(arm, 80, 2e-4, ["--max_steps", 96])
    return make_parser().parse_args_and_config([*places, str(folder), *flags])[0]


@pytest.mark.parametrize("arm", ARMS)
def test_each_arm_is_what_the_protocol_says(arm, tmp_path):
    args = arguments(arm, tmp_path)
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


@pytest.mark.parametrize("arm", CHEAPER)
def test_each_cheaper_arm_scores_single_steps(arm, tmp_path):
    args, shared, drawn = arguments(arm, tmp_path), arm.endswith("-2"), arm.endswith("-v")
    assert (args.estimator, args.segment_steps) == ("replay", 1)
    assert args.sampling_settings().cache == {"P": None, "C": "prefix", "L": "lasting"}[arm[0]]
    assert (args.num_iterations, args.split_views, args.loss_type) == (
        (2, True, "views") if shared else (1, False, "sum")
    )
    assert args.num_views == (2 if drawn else None)


def test_the_best_setting_has_the_highest_mean_of_the_search(tmp_path, monkeypatch):
    """Merged steps and noise on the order are not eligible; a search that lacks a run chooses nothing."""
    monkeypatch.setattr("studies.collapse.run.DATA", tmp_path)
    solved = {("C8", 1e-4): 9, ("G", 1e-4): 9, ("C", 2e-4): 6, ("L-v", 4e-4): 7}
    lines = [{**run, "right": "1" * solved.get((run["arm"], run["rate"]), 5) + "0" * 5} for run in runs("rates")]
    assert len(lines) == 2 * len(RATES) * (len(SINGLE) + 3)
    (tmp_path / "rates.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    assert setting_of("goal", {"arm": BEST}) == ("L-v", 4e-4)
    assert setting_of("seconds", {"arm": "C"}) == ("C", 2e-4)
    assert setting_of("tokens", {"arm": "C"}) == ("C", 2e-4)
    assert setting_of("rates", {"arm": "C", "rate": 1e-4}) == ("C", 1e-4)
    (tmp_path / "rates.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines[:-1]))
    with pytest.raises(ValueError, match="not complete"):
        setting_of("goal", {"arm": BEST})


def test_the_best_setting_is_one_more_arm_of_the_goal():
    """Holm's correction counts it, if at most one of its runs has collapsed."""

    def line(arm, seed, solved):
        return {"arm": arm, "seed": seed, "error": None, "right": "1" * solved + "0" * (512 - solved)}

    reference = [line("exact", seed, 450 + seed % 3) for seed in range(20)]
    lines = [line("C", seed, 450 + seed % 3 + (10, -14)[seed % 2]) for seed in range(20)]
    lines += [line(arm, seed, 400) for arm in ("P8", "P", "P+", "C8", "C+", "C+w", "G") for seed in range(20)]
    one = report.goal(lines + [line(BEST, seed, 300) for seed in range(20)], reference)
    two = report.goal(lines + [line(BEST, seed, 450 + (5, -19)[seed % 2]) for seed in range(20)], reference)
    p = {text: float(text.split("`C`: p ")[1].split(",")[0].rstrip(".\n")) for text in (one, two)}
    assert "best" not in one
    assert "`best`: p " in two
    assert 1e-4 < p[two] == pytest.approx(2 * p[one], rel=0.05)


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
