"""The study of the samplers' goal: its arms, its tables, and a miniature run."""

import shutil
from dataclasses import asdict
from itertools import product
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest

from d1.rl.train import make_parser as rl_parser
from pocket.uncertainty import mean_of
from studies.json_lines import read_lines
from studies.leaderboard.statistics import percent, points
from studies.samplers import runs as sampler_runs
from studies.samplers.goal import ARMS, main, make_parser, planned, run_of, write_page
from studies.samplers.runs import RESULTS, SavePoints

ROOT = Path(__file__).parents[2]


def test_the_arms_differ_by_their_sampler_and_their_steps_alone(tmp_path):
    runs = planned(make_parser().parse_args(["--seeds", "7"]))
    arms = [arm for of_steps in ARMS.values() for arm in of_steps.values()]
    assert [run.sampler for run in runs] == [arm.sampler for arm in arms]
    configs = [vars(rl_parser().parse_args_and_config(run.flags(tmp_path, tmp_path))[0]) for run in runs]
    for config, arm in zip(configs, arms, strict=True):
        del config["distributed_state"]  # an object of its own
        assert (config["max_steps"], config["lr_scheduler_type"]) == (arm.steps, "linear")
    differing = {name for name in configs[0] for other in configs[1:] if other[name] != configs[0][name]}
    assert differing == {"sampler", "kv_cache", "reveal", "reveal_level", "max_steps"}
    assert {(one["block_length"], one["diffusion_steps"], one["learning_rate"]) for one in configs} == {(8, 16, 2e-4)}
    assert len({run.name for run in runs}) == len(runs)


def test_the_console_is_told_when_the_seconds_will_be_over(tmp_path, monkeypatch):
    now, state = [100.0], SimpleNamespace(global_step=0, max_steps=1000)
    monkeypatch.setattr(sampler_runs.time, "process_time", lambda: now[0])
    saver = SavePoints(tmp_path, 20.0, 1)
    saver.on_train_begin()
    assert saver.last_step(state) == 1000
    now[0], state.global_step = 106.0, 3
    assert saver.last_step(state) == 10  # at two seconds a step
    now[0], state.global_step = 107.0, 3
    assert saver.last_step(state) == 9
    assert SavePoints(tmp_path, 0.0, 1).last_step(state) == 1000  # it has no budget


FAST = "lasting"
RIGHT = {"exact": ["11110000", "11111100"], FAST: ["11111000", "11111000"]}
SPENT = {"exact": (120.0, 6_000_000, 100), FAST: (60.0, 2_000_000, 174)}
FED = {"exact": [896.0, 896.0], FAST: [100.0, 121.0]}


def lines(split="test"):
    args = make_parser().parse_args(["--seeds", "6", "7", "--split", split])
    found = []
    for seed, (arm, right) in product(args.seeds, RIGHT.items()):
        point = dict(zip(("seconds", "compute_tokens", "step"), SPENT[arm], strict=True))
        found.append(
            {
                "run": asdict(run_of(ARMS[100][arm], seed, args)),
                "points": [point | {"right": right[seed - 6]}],
                "not_finite": None,
                "own": {"right": "11100000"} if arm == FAST else None,
                "logs": [{"sampling/forward_tokens": fed} for fed in FED[arm]],
            }
        )
    return found


def test_a_table_pairs_each_arm_with_the_exact_one(tmp_path):
    page, args = tmp_path / "page.md", make_parser().parse_args([])
    broken = lines()[0] | {"points": [], "not_finite": "the loss became nan"}
    broken["run"] = broken["run"] | {"seed": 8}
    alone = lines()[1]  # a seed that the exact arm lacks
    alone["run"] = alone["run"] | {"seed": 8}
    write_page([*lines(), *lines("validation"), broken, alone], args, page)
    exact, fast = (np.array([[int(one) for one in right] for right in RIGHT[name]]) for name in RIGHT)
    less = points(mean_of(fast - exact))
    text = page.read_text()
    assert f"| exact | 2 | {percent(mean_of(exact))} |  |  | 896 | 100 | 120.0 | 1.00 | 6.00 | 1.00 |" in text
    assert f"| {FAST} | 2 | {percent(mean_of(fast))} | {less} | 37.5 | 110 | 174 | 60.0 | 2.00 | 2.00 | 3.00 |" in text
    assert f"| 0.0002 | {FAST} | 6: 62.5, 7: 62.5 |" in text
    assert "in no table: 1." in text
    page.write_text(text.replace("Nothing has been read out of it yet.", "It is met."))
    write_page(lines()[:1], args, page)
    assert "It is met." in page.read_text()
    assert FAST not in page.read_text()


def test_a_miniature(tmp_path):
    shutil.copytree(ROOT / "pocket" / "arithmetic_base", tmp_path / "arithmetic_sft0" / "sft")
    arms = ["exact", "lasting"]
    flags = ["--seeds", "0", "--steps", "50", "--arms", *arms, "--share", "0.04", "--limit", "8"]
    flags += ["--output_dir", str(tmp_path)]
    main(make_parser().parse_args(flags))
    found = read_lines(tmp_path / RESULTS)
    assert [line["run"]["sampler"] for line in found] == [ARMS[50][arm].sampler for arm in arms]
    assert [line["points"][-1]["step"] for line in found] == [2, 3]
    assert all(len(line["points"][-1]["right"]) == 8 for line in found)
    page = (tmp_path / "fast_rollouts_goal.md").read_text()
    assert all(f"| {arm} | 1 |" in page for arm in arms)
    before = (tmp_path / RESULTS).read_bytes()
    main(make_parser().parse_args(flags))  # there is nothing left to do
    assert (tmp_path / RESULTS).read_bytes() == before


REFUSED = ["--share 0", "--share 1.5", "--learning_rate 0", "--limit -1", "--steps 50 100 --arms dual"]


@pytest.mark.parametrize("flags", REFUSED)
def test_numbers_out_of_range_and_budgets_without_an_arm_are_refused(flags, tmp_path):
    with pytest.raises(ValueError, match=r"must|needs one of its --arms"):
        main(make_parser().parse_args([*flags.split(), "--output_dir", str(tmp_path)]))
