"""The factorial: its cells, its effects against models with known effects, and a run of a few steps."""

from __future__ import annotations

import numpy as np
import pytest
from scipy.stats import ttest_1samp

from d1.rl.train import make_parser
from pocket.recipes import ROOT
from studies.factorial import report, run
from studies.factorial.run import CELLS, SEARCH_SEEDS, SEEDS, STUDIED

SOME = {"setup": "sudoku-sft", "seed": 300}


def test_the_cells_are_all_sets_of_ideas_and_differ_in_their_flags_alone(tmp_path):
    assert len({*CELLS}) == 16
    seen = {}
    for cell in CELLS:
        flags = [*run.settings(SOME | {"cell": cell}, 1e-4), "--output_dir", str(tmp_path)]
        config, _ = make_parser().parse_args_and_config(["--config", str(ROOT / "diffu-grpo" / "pocket.yaml"), *flags])
        seen[cell] = config
    own = ("p_mask_prompt", "advantage", "right_share", "temperature", "sampler", "estimator")
    values = {cell: tuple(str(getattr(config, name)) for name in own) for cell, config in seen.items()}
    assert len({*values.values()}) == 16
    same = ("objective", "loss_type", "kl", "beta", "epsilon", "num_iterations", "max_grad_norm", "num_generations")
    assert len({tuple(getattr(config, name) for name in same) for config in seen.values()}) == 1
    assert {*SEEDS}.isdisjoint(SEARCH_SEEDS)


def test_effects_are_those_of_a_model_with_interactions():
    generator = np.random.default_rng(0)
    level = generator.normal(size=(8, 1)) * 0.1 + generator.uniform(size=(1, 30))  # shared by all cells of a seed
    of_prompt, of_replay, both = 0.1 + 0.02 * generator.normal(size=(8, 1)), -0.05, 0.04
    cells = {}
    for cell in CELLS:
        prompt, replay = (idea in cell.split("+") for idea in ("prompt", "replay"))
        cells[cell] = level + of_prompt * prompt + of_replay * replay + both * (prompt and replay)
    found = report.effects(cells)
    assert len(found) == 15
    assert found["prompt",].value == pytest.approx(of_prompt.mean() + both / 2)
    assert found["replay",].value == pytest.approx(of_replay + both / 2)
    assert found["prompt", "replay"].value == pytest.approx(both / 2)
    others = [mean for ideas, mean in found.items() if not {*ideas} <= {"prompt", "replay"}]
    assert [mean[:3] for mean in others] == [pytest.approx((0, 0, 0), abs=1e-12)] * 12
    low, high = ttest_1samp(of_prompt[:, 0] + both / 2, 0).confidence_interval()
    assert found["prompt",][1:3] == pytest.approx((low, high))


def test_the_tables_wait_for_all_cells_and_test_main_effects_and_pairs(tmp_path):
    generator = np.random.default_rng(1)
    lines = [
        {"setup": setup, "cell": cell, "seed": seed, "rate": 1e-4, "steps": 57}
        | {"right": "".join(generator.choice(["0", "1"], 40))}
        for setup in STUDIED
        for cell in CELLS
        for seed in SEEDS
    ]
    rows = [line for line in report.tables(lines).splitlines() if line.startswith(("| sudoku", "| arith"))]
    assert len(rows) == 2 * 15
    assert sum(row.split("|")[4].strip() != "" for row in rows) == 2 * 10
    right = [line["right"] for line in lines if (line["setup"], line["cell"]) == (STUDIED[0], CELLS[-1])]
    share = np.mean([one == "1" for one in "".join(right)])
    assert f"| {CELLS[-1]} | {100 * share:.1f} [" in report.tables(lines)
    assert report.tables(lines[:-1]) == "255 of 256 planned runs are done. Effects wait for all cells.\n"
    report.figure(lines[:-1], tmp_path / "effects.svg")
    assert not (tmp_path / "effects.svg").exists()
    report.figure(lines, tmp_path / "effects.svg")
    assert all(text in (tmp_path / "effects.svg").read_text() for text in (*STUDIED, "advantages x replay"))


def test_the_rate_with_the_highest_mean_is_chosen_and_a_search_must_be_complete():
    right = {3e-5: "1100", 1e-4: "1110", 3e-4: "0111"}
    lines = [
        {"setup": "sudoku-sft", "cell": "none", "seed": seed, "rate": rate, "right": right[rate]}
        for seed in SEARCH_SEEDS
        for rate in right
    ]
    assert run.chosen("sudoku-sft", "none", lines) == 1e-4
    with pytest.raises(ValueError, match="the search of sudoku-sft, none is not complete"):
        run.chosen("sudoku-sft", "none", lines[:-1])


def test_a_cell_trains_and_is_judged_on_new_problems(tmp_path, monkeypatch):
    monkeypatch.setattr(run, "PROBLEMS", 20)
    judge = run.problems_of("sudoku-sft", tmp_path)
    found = run.line(SOME | {"cell": CELLS[-1]}, 1e-4, tmp_path, judge, budget=60_000)
    assert len(found["right"]) == 20
    assert found["compute"] >= 60_000
    assert found["steps"] >= 1
    assert found["error"] is None
    assert not list(tmp_path.glob("sudoku-sft-*"))
