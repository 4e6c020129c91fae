"""The study of a causal context: what its runs share, its tables, and a run of a few steps with each attention."""

from __future__ import annotations

import numpy as np
import pytest
from scipy.stats import ttest_1samp

from d1.rl.train import make_parser
from d1.tasks import load_task
from pocket.recipes import ROOT
from studies.causal_context import report, run
from tests.studies import prose


def test_both_kinds_of_attention_have_the_same_settings_and_the_methods_their_own(tmp_path):
    found = {}
    for arm in run.RL:
        flags = ["--config", str(ROOT / "diffu-grpo" / "pocket.yaml"), "--output_dir", str(tmp_path)]
        flags += run.settings({"arm": arm, "seed": 0}, run.BUDGET)
        found[arm], _ = make_parser().parse_args_and_config(flags)
    own = {arm: (of.estimator, of.remasking, of.first_token, of.temperature) for arm, of in found.items()}
    assert own == {
        "replay": ("replay", "low_confidence", None, 0.6),
        "JustGRPO": ("left_to_right", "leftmost", "masked", 1.0),
    }
    for name in ("learning_rate", "max_compute_tokens", "num_generations", "num_iterations", "max_grad_norm"):
        assert len({getattr(of, name) for of in found.values()}) == 1, name
    assert len(run.runs()) == 2 * (1 + 3 * 3)


def test_tables_have_the_means_and_students_intervals_of_the_lines(monkeypatch, tmp_path):
    generator, lines = np.random.default_rng(0), []
    for one in run.runs():
        found = {}
        for name in run.samplers(one["attention"], one["arm"]):
            level = 0.4 + 0.1 * run.ARMS.index(one["arm"]) + 0.05 * one["seed"]
            solved = "1" * int(100 * level) + "0" * (100 - int(100 * level))
            passes = generator.integers(5, 20)
            found[name] = {"solved": solved, "tokens": 28.0, "passes": int(passes)}
        lines.append({**one, "samplers": found, "steps": 9, "compute": 2_000_000, "processor_seconds": 40.0})
    page = tmp_path / "page.md"
    page.write_text(report.table(lines))
    arms, speeds = prose.tables_in(page)
    row = next(cells for cells in arms[2] if cells[:2] == ["causal-context", "replay"])
    low, high = ttest_1samp([0.2, 0.25, 0.3], 0).confidence_interval()
    value, *ends = prose.numbers(row[3])
    assert value == pytest.approx(25.0)
    assert ends[0] < 100 * low  # the problems' part widens it
    assert ends[1] > 100 * high
    for cells in speeds[2]:
        for at, attention in ((2, "block-causal"), (4, "causal-context")):
            own = report.judged(lines, attention, cells[0], cells[1])
            assert float(cells[at]) == pytest.approx(np.mean([28 / one["passes"] for one in own]), abs=0.006)
        assert prose.numbers(cells[6]) == [0, 0, 0]
    assert len(speeds[2]) == 6 * 4 + 1
    assert report.table(lines[1:]) == "19 of 20 planned runs are done. Tables wait for all of them.\n"


def test_the_numbers_of_the_reading_are_those_of_the_tables():
    page = run.RUNS.parents[1] / "README.md"
    assert prose.check(page) == []
    assert len([*prose.TAG.finditer(page.read_text())]) > 10


@pytest.mark.parametrize("arm", run.RL)
def test_an_arm_trains_and_is_judged(tmp_path, arm):
    rows = load_task("sudoku").load_rows("validation").select(range(8))
    one = {"attention": "causal-context", "arm": arm, "seed": 0}
    found = run.line(one, tmp_path, rows, budget=50_000)
    assert found["error"] is None
    assert found["compute"] >= 50_000
    assert found["samplers"].keys() == run.samplers("causal-context", arm).keys()
    for name, of in found["samplers"].items():
        assert len(of["solved"]) == 8, name
    passes = {name: of["passes"] for name, of in found["samplers"].items()}
    assert passes["exact 1"] > passes["exact 2"] > passes["exact 4"]
    assert not list(tmp_path.glob("causal-context-*"))
