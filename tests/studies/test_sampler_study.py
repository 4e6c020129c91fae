"""The study of samplers inside RL: its runs, its tables, and a miniature run."""

import json
import re
import shutil
from dataclasses import asdict
from pathlib import Path

import numpy as np
import pytest

from d1.rl.methods import METHODS
from d1.rl.train import make_parser as rl_parser
from pocket.uncertainty import mean_of
from studies.json_lines import read_lines
from studies.leaderboard.plan import START, TASKS
from studies.leaderboard.statistics import pooled_seeds
from studies.samplers.outcomes import Results, Setup, first_reach, of_largest_budget, outcome
from studies.samplers.report import write_report
from studies.samplers.run import main, make_parser, planned
from studies.samplers.runs import (
    CURES,
    ESTIMATORS,
    LASTING,
    LEVELS,
    NO_CURE,
    OF_BLOCKS,
    PREFIX,
    RATE,
    RESULTS,
    SAMPLERS,
    SURER,
    Level,
    Run,
)

SURE = {SURER: "dual", LASTING: "lasting", PREFIX: "prefix"}  # levels of word problems' cached+parallel alone
ROOT = Path(__file__).parents[2]


def run_of(sampler="exact", cure=NO_CURE, seed=0, estimator="one_step", task="sudoku", **changes):
    values = {"split": "test", "learning_rate": RATE, "seconds": 10.0, "points": 2, "limit": 8} | changes
    return Run(task, sampler, estimator, cure, seed, **values)


FAST = "cached+parallel"
CASES = [(sampler, "one_step", "sudoku", NO_CURE) for sampler in SAMPLERS]
CASES += [(FAST, estimator, task, NO_CURE) for estimator in ESTIMATORS for task in TASKS]
CASES += [(FAST, "replay", "arithmetic", cure) for cure in CURES]


@pytest.mark.parametrize(("sampler", "estimator", "task", "cure"), CASES)
def test_runs_differ_from_d1_or_tracerl_by_sampler_estimator_and_cure_alone(sampler, estimator, task, cure, tmp_path):
    own = {"one_step": {"num_iterations": 4}, "tracerl": {}}
    own["replay"] = {"num_iterations": 4, "estimator": "replay", "p_mask_prompt": 0}
    expected = METHODS["tracerl" if estimator == "tracerl" else "d1"].values | own[estimator]
    expected |= {"temperature": float(cure.split()[-1])} if "temperature" in cure else {}
    run = run_of(sampler, cure, estimator=estimator, task=task)
    config, _ = rl_parser().parse_args_and_config(run.flags(tmp_path, tmp_path / "out"))
    assert {name: getattr(config, name) for name in expected} == expected
    assert config.sampler == sampler
    assert config.max_completion_length == TASKS[task].length
    assert config.sampling_weight_cap == (float(cure.split()[-1]) if "weights" in cure else None)
    assert config.lr_scheduler_type == "constant"
    if cure in SURE:
        assert (config.reveal, config.reveal_level, config.kv_cache) == ("threshold", 0.95, SURE[cure])
    level = LEVELS[task][sampler] if cure not in OF_BLOCKS else Level()
    length = config.max_completion_length
    assert config.block_length == (length // level.blocks if level.blocks else 8)
    assert config.diffusion_steps == (level.steps or length // 2)


def test_runs_come_seed_by_seed_and_each_seed_begins_with_its_start():
    runs = planned(make_parser().parse_args(["--seeds", "0", "1"]))
    assert [run.seed for run in runs] == [0] * 13 + [1] * 13
    assert [number for number, run in enumerate(runs) if run.sampler == START] == [0, 13]
    assert len({run.name for run in runs}) == len(runs)


def test_a_level_is_first_reached_on_a_straight_line_between_points():
    places, values = np.array([0.0, 10.0, 20.0]), np.array([0.5, 0.7, 0.6])
    assert first_reach(places, values, 0.6) == pytest.approx(5.0)
    assert first_reach(places, values, 0.4) == 0
    assert first_reach(places, values, 0.8) is None


RIGHT = {  # (sampler, seed) -> what was solved at 5 and at 10 seconds; the start solves two of eight
    ("exact", 0): ["11100000", "11110000"],
    ("exact", 1): ["11100000", "11111100"],
    ("parallel", 0): ["11111000", "11111000"],
    ("parallel", 1): ["11111000", "11111110"],
    ("cached", 0): ["11000000", "10000000"],
    ("cached", 1): ["11000000"],  # then its loss was no longer finite
}


def lines():
    found = []
    for seed in (0, 1):
        start = run_of(START, seed=seed, estimator=START, learning_rate=0.0, seconds=0.0, points=1)
        found.append({"run": asdict(start), "points": [{"right": "11000000"}]})
    for (sampler, seed), rights in RIGHT.items():
        points = [
            {"right": right, "seconds": 5.0 * (i + 1), "compute_tokens": 100 * (i + 1), "step": i + 1}
            for i, right in enumerate(rights)
        ]
        log = {"step": 1, "entropy": 0.5, "rewards/accuracy/mean": 0.25, "sampling/logp_difference_abs": 0.125}
        reason = None if len(rights) == 2 else "the loss became nan"
        found.append({"run": asdict(run_of(sampler, seed=seed)), "points": points, "logs": [log] * 4})
        found[-1] |= {"not_finite": reason, "own": {"right": "11100000"} if sampler == "parallel" else None}
    return found


def test_outcomes_are_paired_with_the_exact_sampler_and_a_diverged_run_solves_nothing():
    results = Results(lines())
    of = {
        sampler: outcome(results, Setup("sudoku", "one_step", sampler, NO_CURE))
        for sampler in SAMPLERS
        if Setup("sudoku", "one_step", sampler, NO_CURE) in results.lines
    }
    assert of["exact"].final.value == 10 / 16
    ends = {
        sampler: np.array([[int(one) for one in right] for right in rows])
        for sampler, rows in (
            ("exact", ["11110000", "11111100"]),
            ("parallel", ["11111000", "11111110"]),
            ("cached", ["10000000", "00000000"]),
        )
    }
    of_seeds = pooled_seeds([dict(enumerate(rows)) for rows in ends.values()])
    assert of["parallel"].to_exact == mean_of(ends["parallel"] - ends["exact"], of_seeds)
    # Exact's mean curve is 2, 3 and 5 of eight, so it reaches its end at 10 s; parallel's is 2, 5 and 6, so it reaches
    # that at 5 s.
    assert of["exact"].whole == [10.0, 200.0]
    assert of["parallel"].whole == [5.0, 100.0]
    assert of["parallel"].less == [2.0, 2.0]
    assert not of["parallel"].meets
    assert of["parallel"].near[0] == pytest.approx(5 * (0.95 * 5 - 2) / 3)
    assert of["cached"].final.value == 1 / 16
    assert of["cached"].diverged.startswith("1 / 2")
    assert of["cached"].whole == [None, None]


def test_each_task_shows_the_budget_with_the_most_runs():
    short = [run_of(seed=seed) for seed in (0, 1)]
    long = [run_of(seed=0, seconds=60.0), run_of(seed=0, task="arithmetic", seconds=60.0)]
    left_out = [run_of(START), run_of(split="validation")]
    found = of_largest_budget({"run": asdict(run)} for run in [*long, *short, *left_out])
    own = {"sudoku": short, "arithmetic": long[1:]}
    assert found == {task: [{"run": asdict(run)} for run in runs] for task, runs in own.items()}


def test_the_page_has_all_that_is_there_and_keeps_what_was_written_by_hand(tmp_path):
    page = tmp_path / "fast.md"
    assert "No run" in write_report(lines()[:2], page)
    assert not page.exists()
    looked_at = {"run": asdict(run_of(split="validation")), "points": [{"right": "11110000", "seconds": 9.9}]}
    assert write_report([*lines(), looked_at], page).startswith("6 runs are done")
    assert "| sudoku | one_step | exact | 0 | 0.0001 | 50.0 at 10 s |" in page.read_text()
    page.write_text(page.read_text().replace("Nothing has been read out of it yet.", "They are stable."))
    write_report(lines(), page)
    text = page.read_text()
    assert text.count("They are stable.") == 1
    assert re.search(r"\| parallel \| 2 \| 75.0 \[[^]]*\] \| 37.5 \| ", text)
    assert "1 / 2" in text
    assert "**Partial: 6 of 12 runs without a cure" in text
    assert page.with_suffix(".png").exists()


def test_a_miniature_that_was_cut_off_goes_on_with_the_run_that_is_missing(tmp_path):
    shutil.copytree(ROOT / "pocket" / "base", tmp_path / "sudoku_sft0" / "sft")
    flags = ["--seeds", "0", "--samplers", "cached", "--estimators", "one_step", "--seconds", "2.4"]
    flags += ["--cures", "weights up to 3", "--points", "2", "--limit", "8", "--output_dir", str(tmp_path)]
    (tmp_path / RESULTS).write_text('{"run": {"task"')  # killed here
    main(make_parser().parse_args(flags))
    found = read_lines(tmp_path / RESULTS)
    assert [line["run"]["sampler"] for line in found] == [START, "cached"]
    assert found[1]["not_finite"] is None
    first, last = found[1]["points"]
    assert 1.2 <= first["seconds"] < last["seconds"]
    assert last["seconds"] >= 2.4
    assert 0 < first["compute_tokens"] < last["compute_tokens"]
    assert len(last["right"]) == 8
    assert 0 < found[1]["logs"][0]["sampling/weight_mean"] <= 3
    assert len(found[1]["own"]["right"]) == 8
    assert not [path for path in tmp_path.iterdir() if path.is_dir() and path.name != "sudoku_sft0"]
    text = (tmp_path / "fast_rollouts.md").read_text()
    assert "cached, weights up to 3" in text
    (tmp_path / RESULTS).write_text(json.dumps(found[0]) + "\n" + json.dumps(found[1])[:50])
    main(make_parser().parse_args(flags))
    again = read_lines(tmp_path / RESULTS)
    assert again[0] == found[0]
    assert again[1]["run"] == found[1]["run"]
    before = (tmp_path / RESULTS).read_bytes()
    main(make_parser().parse_args(flags))  # there is nothing left to do
    assert (tmp_path / RESULTS).read_bytes() == before
