"""The study of fast rollouts: its arms, its statistics, its table, and a miniature run."""

import json
import shutil
from itertools import combinations

import numpy as np
import pytest
from scipy.stats import beta, ttest_1samp

from d1.rl.methods import METHODS
from d1.rl.train import make_parser as rl_parser
from pocket.recipes import ROOT
from pocket.uncertainty import mean_of
from studies.json_lines import append_line
from studies.reports import percent, points
from studies.samplers import rollouts, rollouts_report
from studies.samplers.rollouts import ARMS, CAUSES, STAGES, Arm, line, runs, settings
from studies.samplers.rollouts_report import MARGIN, collapsed, of_stage, p_not_worse, share, verdicts


def config_of(arm, tmp_path):
    places = ["--model_path", str(tmp_path), "--output_dir", str(tmp_path)]
    return vars(rl_parser().parse_args_and_config([*places, *settings(arm, 7)])[0])


CHANGED = {"max_grad_norm": 0.2, "temperature": 0.9, "segment_steps": 2, "learning_rate": 1e-4}


def test_each_cause_is_one_setting_away_from_lasting(tmp_path):
    lasting, *others = (config_of(arm, tmp_path) for arm in (ARMS["lasting"], *CAUSES.values()))
    found = [{name: config[name] for name in config if config[name] != lasting[name]} for config in others]
    assert [{name: one[name] for name in one.keys() - {"distributed_state"}} for one in found] == [
        {name: value} for name, value in CHANGED.items()
    ]


@pytest.mark.parametrize("stage", STAGES.values(), ids=[*STAGES])
def test_the_arms_differ_by_their_sampler_and_their_steps_alone(stage, tmp_path):
    arms = [arm for name, arm in stage.arms.items() if name not in CAUSES]
    configs = [config_of(arm, tmp_path) for arm in arms]
    assert [config["max_steps"] for config in configs] == [arm.steps for arm in arms]
    for one, other in combinations(configs, 2):
        differing = {name for name in one if one[name] != other[name]} - {"distributed_state"}
        assert differing <= {"sampler", "kv_cache", "reveal", "reveal_level", "max_steps"}
    own = METHODS["tracerl"].values | {"num_iterations": 1, "split_views": False, "learning_rate": 2e-4}
    own |= {"block_length": 8, "diffusion_steps": 16, "max_completion_length": 32}
    assert {name: configs[0][name] for name in own} == own
    assert configs[0]["sampler"] == "exact"
    assert {(c["sampler"], c["reveal"], c["reveal_level"]) for c in configs[1:]} == {
        ("cached+parallel", "threshold", 0.95)
    }


def test_no_seed_was_used_before_or_in_the_other_stage():
    seeds = [seed for stage in STAGES.values() for seed in stage.seeds]
    assert len({*seeds}) == len(seeds) == 24
    assert min(seeds) > 31


def test_differences_between_seeds_alone_are_judged_by_students_test():
    rng = np.random.default_rng(0)
    for mean in (-0.03, 0.0, 0.05):
        of_seeds = mean + 0.03 * rng.standard_normal(20)
        expected = ttest_1samp(of_seeds, -0.02, alternative="greater").pvalue
        assert p_not_worse(np.tile(of_seeds[:, None], (1, 50))) == pytest.approx(expected, rel=1e-6)
    assert MARGIN == 0.02


def test_a_share_has_the_interval_of_clopper_and_pearson():
    assert share(2, 24) == pytest.approx((2 / 24, beta.ppf(0.025, 2, 23), beta.ppf(0.975, 3, 22)))
    assert share(0, 20)[1:] == pytest.approx((0, 1 - 0.025 ** (1 / 20)))


RIGHT = {  # arm -> problems solved with each of two seeds, of 50
    "exact": (45, 47),
    "lasting": (46, 40),
    "prefix": (44, 45),
}
COST = {"exact": (6_000_000, 120.0), "lasting": (2_000_000, 60.0), "prefix": (3_000_000, 80.0)}


def made_up(seeds, right):
    """Lines of the stage "test"."""
    for place, seed in enumerate(seeds):
        for arm, solved in right.items():
            count, (compute, seconds) = solved[place % len(solved)], COST[arm]
            found = {"exact": "1" * count + "0" * (50 - count)} | ({} if arm == "exact" else {"own": "10" * 25})
            costs = {"compute": compute, "processor_seconds": seconds, "steps": 100, "completion_tokens": 300.4}
            yield {"stage": "test", "arm": arm, "seed": seed, "right": found, **costs}


def arms_of(lines):
    arms = {}
    for one in lines:
        arms.setdefault(one["arm"], {})[one["seed"]] = one
    return arms


def test_a_run_has_collapsed_if_it_is_eight_points_below_the_mean_of_exact():
    arms = arms_of(made_up((40, 41), RIGHT))  # exact: 90 and 94%, mean 92
    assert collapsed(arms["lasting"], arms["exact"]) == [41]  # 80%
    assert collapsed(arms["prefix"], arms["exact"]) == []


def test_the_table_pairs_seeds_and_has_a_verdict_only_when_all_is_there(tmp_path, monkeypatch):
    monkeypatch.setattr(rollouts_report, "DATA", tmp_path / "rollouts.jsonl")
    assert of_stage("test").endswith("0 of 60 planned runs are done.\n")
    lines = [*made_up((40, 41), RIGHT)]
    for one in lines:
        append_line(rollouts_report.DATA, one)
    text = of_stage("test")
    exact, lasting = (
        np.array([[float(i < count) for i in range(50)] for count in RIGHT[arm]]) for arm in ("exact", "lasting")
    )
    cells = next([cell.strip() for cell in row.split("|")] for row in text.splitlines() if row.startswith("| lasting"))
    assert cells[2:6] == ["2", percent(mean_of(lasting)), points(mean_of(lasting - exact)), "50.0"]
    assert cells[6].startswith("1: 50.0 [1.3, 98.7]")
    assert cells[7:-1] == ["100", "300", "2.00", "3.00", "60.0", "2.00"]
    assert "after Holm" not in text
    removed = [one | {"arm": "removed"} for one in lines if one["arm"] == "lasting"]
    for one in [*removed, *made_up([*STAGES["test"].seeds][2:], RIGHT)]:
        append_line(rollouts_report.DATA, one)
    text = of_stage("test")
    assert "60 of 60 planned runs are done." in text
    assert "| removed | 2 |" in text  # an arm that exists no more
    assert text.count("after Holm") == 2


def test_verdicts_are_adjusted_for_both_comparisons():
    arms = arms_of(made_up(range(40, 60), RIGHT | {"prefix": (46, 47)}))
    said = verdicts(arms).splitlines()
    assert "`lasting`: a loss is not excluded" in said[0]
    assert "`prefix`: not worse than exact" in said[1]


@pytest.mark.parametrize(("stage", "name"), [("test", "exact"), ("trial", "lasting, two steps per view")])
def test_a_miniature(stage, name, tmp_path):
    shutil.copytree(ROOT / "pocket" / "arithmetic_base", tmp_path / "arithmetic_sft64" / "sft")
    (tmp_path / "arithmetic_sft64" / "done").touch()
    run = {"stage": stage, "arm": name, "seed": 64}
    assert (run in runs(stage)) == (stage == "trial")
    found = json.loads(json.dumps(line(run, tmp_path, limit=8, steps=2)))
    assert (found["error"], found["steps"], len(found["sampled"])) == (None, 2, 2)
    assert {by: len(right) for by, right in found["right"].items()} == dict.fromkeys(
        ["exact", "own"] if stage == "trial" else ["exact"], 8
    )
    assert found["compute"] > 2 * 64 * found["completion_tokens"] > 0
    assert found["processor_seconds"] > 0
    assert [path.name for path in tmp_path.iterdir()] == ["arithmetic_sft64"]
    flags = STAGES[stage].arms[name].sampler
    assert Arm(None, 1).sampler == flags[:4]
    assert set(flags) < set(found["settings"])


def test_a_run_that_did_not_stay_finite_has_solved_nothing(tmp_path, monkeypatch):
    def failing(name, flags):
        (tmp_path / name).mkdir()
        return "the loss became nan"

    monkeypatch.setattr(rollouts, "train", failing)
    shutil.copytree(ROOT / "pocket" / "arithmetic_base", tmp_path / "arithmetic_sft64" / "sft")
    (tmp_path / "arithmetic_sft64" / "done").touch()
    found = line({"stage": "trial", "arm": "lasting", "seed": 64}, tmp_path, limit=8)
    assert found["right"] == {"exact": "0" * 8, "own": "0" * 8}
    assert (found["error"], found["steps"]) == ("the loss became nan", 0)
