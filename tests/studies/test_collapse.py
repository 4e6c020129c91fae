"""The study of fast rollouts: its arms are settings of RL, and its tests are those that the protocol names."""

from itertools import product

import numpy as np
import pytest
from scipy.stats import ttest_1samp

from d1.rl.train import make_parser
from pocket.recipes import ROOT
from studies.collapse import report
from studies.collapse import run as collapse
from studies.collapse.run import ARCHIVED, ARMS, DATA, FAST, STAGES, THIRD, flags_of, runs
from studies.json_lines import read_lines


def arguments(arm, folder):
    places = ["--config", str(ROOT / "diffu-grpo" / "pocket.yaml"), "--model_path", str(ROOT), "--output_dir"]
    flags = flags_of(arm, 80, ["--max_steps", 96])
    return make_parser().parse_args_and_config([*places, str(folder), *flags])[0]


@pytest.mark.parametrize("arm", ARMS)
def test_each_arm_is_what_the_protocol_says(arm, tmp_path):
    args = arguments(arm, tmp_path)
    sampling, merged = args.sampling_settings(), arm in ("exact", "P8", "C8")
    assert (args.estimator, args.objective) == ("replay", "clipped_views")
    assert sampling.cache == ("prefix" if arm.startswith("C") else None)
    assert (sampling.rule, sampling.level) == ((None, 0.0) if arm == "exact" else ("threshold", 0.95))
    assert args.loss_type == ("views" if merged else "sum")
    assert not merged or args.segment_steps == 8
    assert arm not in ("P", "C") or args.segment_steps == 1
    assert args.num_iterations == 1


def test_the_archived_arms_are_data_alone():
    """Their lines are complete, and no command can start them."""
    assert {*FAST} == {*ARCHIVED} | {arm for arm in ARMS if arm != "exact"}
    for stage in ("test", "tokens"):
        seeds = {
            arm: {line["seed"] for line in read_lines(DATA / f"{stage}.jsonl") if line["arm"] == arm} for arm in FAST
        }
        assert all(found == {*STAGES[stage].seeds} for found in seeds.values())
    assert not {*ARCHIVED} & {*ARMS, *THIRD}


@pytest.mark.parametrize("arm", THIRD)
def test_each_arm_at_a_third_of_the_tokens_is_what_its_name_says(arm, tmp_path):
    args, (letter, steps, _, *loss) = arguments(arm, tmp_path), arm
    sampling = args.sampling_settings()
    assert sampling.rule == (None if letter == "E" else "threshold")
    assert sampling.cache == {"E": None, "P": None, "C": "prefix", "D": "dual"}[letter]
    assert args.segment_steps == int(steps)
    assert args.loss_type == {"mean": "views", "sum": "sum"}["".join(loss)]
    assert (args.estimator, args.num_iterations) == ("replay", 1)


def test_the_eight_cells_differ_in_three_factors_alone(tmp_path):
    """Each cell's arm has the settings of its three levels: rollouts, steps per view, loss."""
    assert set(report.CELLS) == set(product(("exact", "fast"), ("merged", "single"), ("mean", "sum")))
    for (rollouts, steps, loss), arm in report.CELLS.items():
        args = arguments(arm, tmp_path)
        assert (args.sampling_settings().rule is None) == (rollouts == "exact"), arm
        assert args.segment_steps == (8 if steps == "merged" else 1), arm
        assert args.loss_type == ("views" if loss == "mean" else "sum"), arm
        assert args.sampling_settings().cache is None, arm


def test_effects_are_those_of_a_model_with_an_interaction():
    generator = np.random.default_rng(0)
    level = generator.normal(size=(8, 1)) * 0.1 + generator.uniform(size=(1, 30))
    of_rollouts = 0.1 + 0.02 * generator.normal(size=(8, 1))
    cells = {}
    for cell in report.CELLS:
        fast, single = cell[0] == "fast", cell[1] == "single"
        cells[cell] = level + of_rollouts * fast - 0.05 * single + 0.04 * (fast and single)
    found = report.effects(cells)
    rollouts = found["rollouts: fast, not exact"]
    assert rollouts.value == pytest.approx(of_rollouts.mean() + 0.02)
    assert rollouts[1:3] == pytest.approx(ttest_1samp(of_rollouts[:, 0] + 0.02, 0).confidence_interval())
    assert found["views: single steps, not merged"].value == pytest.approx(-0.03)
    assert found["loss: sum, not mean"][:3] == pytest.approx((0, 0, 0), abs=1e-12)
    assert found["rollouts x views"].value == pytest.approx(0.02)
    assert len(found) == 6


def test_runs_below_the_limit_are_counted_and_compared_as_registered():
    """13 against 3 of 20 is beyond chance after Holm's correction over seven tests, 6 against 1 is not."""
    bad = {"P8": 13, "P": 3, "C8": 6, "C": 1}
    lines = []
    for run in runs("test"):
        solved = 413 - (run["seed"] - 80 < bad.get(run["arm"], 0))  # of 512: 80.7% or 80.5%
        lines.append({**run, "error": None, "right": "1" * solved + "0" * (512 - solved)})
    assert len(lines) == 160
    assert report.below_limit({"error": "not finite", "right": "1" * 512})
    rows = [row.split("|")[1:-1] for row in report.verdicts(lines).splitlines()[2:]]
    found = {tuple(cell.strip() for cell in row[:3]): float(row[3]) for row in rows}
    assert found["merging", "P: 3", "P8: 13"] == pytest.approx(7 * 0.00154, rel=0.05)
    assert found["merging, with a cache", "C: 1", "C8: 6"] > 0.05
    assert rows[0][4].strip().startswith("+0.1 ")  # ten of 20 runs solve one of 512 problems more


def test_the_goal_counts_the_arms_with_at_most_one_run_below_the_limit():
    """Holm's correction counts these alone."""

    def line(arm, seed, solved):
        return {"arm": arm, "seed": seed, "error": None, "right": "1" * solved + "0" * (512 - solved)}

    reference = [line("exact", seed, 450 + seed % 3) for seed in range(20)]
    lines = [line("C", seed, 450 + seed % 3 + (10, -14)[seed % 2]) for seed in range(20)]
    lines += [line(arm, seed, 400) for arm in ("P8", "P", "C8") for seed in range(20)]
    one = report.goal(lines + [line("D8-sum", seed, 300) for seed in range(20)], reference)
    two = report.goal(lines + [line("D8-sum", seed, 450 + (5, -19)[seed % 2]) for seed in range(20)], reference)
    p = {text: float(text.split("`C`: p ")[1].split(",")[0].rstrip(".\n")) for text in (one, two)}
    assert "D8-sum" not in one
    assert "`D8-sum`: p " in two
    assert 1e-4 < p[two] == pytest.approx(2 * p[one], rel=0.05)


def test_all_stages_have_the_same_seeds():
    assert {stage.seeds for stage in STAGES.values()} == {range(80, 100)}


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["--seeds", "5"], "--seeds 5: the seeds of third are 80 to 99"),
        (["--seeds", "80", "7"], "--seeds 7: the seeds"),
        (["test", "--arms", "E8-sum"], "--arms E8-sum: the arms of test are P8, P, C8, C$"),
    ],
)
def test_a_seed_or_an_arm_that_a_stage_has_not_is_an_error_before_any_run(flags, message, tmp_path, monkeypatch):
    monkeypatch.setattr(collapse, "complete", lambda *_: pytest.fail("a run began"))
    with pytest.raises(ValueError, match=message):
        collapse.main(collapse.make_parser().parse_args(["third", *flags, "--output_dir", str(tmp_path)]))


def test_the_flags_choose_runs_and_a_quick_trial_runs_again(tmp_path, monkeypatch):
    begun = []

    def line(stage, folder, quick, run):
        begun.append((stage, run["arm"], run["seed"]))
        return {}

    monkeypatch.setattr(collapse, "line", line)
    flags = ["third", "test", "--quick", "--seeds", "81", "80", "--arms", "E8-sum", "P", "--output_dir", str(tmp_path)]
    for _ in range(2):
        collapse.main(collapse.make_parser().parse_args(flags))
    assert begun == 2 * [("third", "E8-sum", 81), ("test", "P", 81)]
    args = collapse.make_parser().parse_args(["third", "--seeds", "82", "80", "--arms", "E8-sum"])
    assert [run["seed"] for run in collapse.chosen_runs("third", args)] == [82, 80]
