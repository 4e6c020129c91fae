"""The table of samplers: fresh problems, paired differences, work counted from the exact sampler's."""

import json
import math
from pathlib import Path

import pytest

from benchmarks import batching, samplers
from d1.tasks import load_task


def test_problems_are_new_and_on_grids_that_no_training_sees():
    rows = samplers.fresh_problems(300, seed=5)
    assert len({row["question"] for row in rows}) == 300
    solutions = set(rows["ground_truth"])
    task = load_task("sudoku")
    for split in ("train", "validation"):
        assert not solutions & set(task.load_rows(split)["ground_truth"])
    known = set(task.load_rows("test")["question"])
    assert sum(row["question"] in known for row in rows) < 30


def test_a_margin_is_half_of_the_normal_interval():
    mean, margin = samplers.with_margin([1.0] * 75 + [0.0] * 25)
    assert mean == pytest.approx(75)
    assert margin == pytest.approx(100 * 1.959964 * math.sqrt(0.75 * 0.25 / 99), rel=1e-5)


def test_the_table_holds_every_sampler_and_counts_its_work(tmp_path, capsys):
    flags = ["--model_path", str(Path(__file__).parents[2] / "pocket" / "base"), "--problems", "6", "--repeats", "1"]
    samplers.main(samplers.make_parser().parse_args([*flags, "--gen_length", "40", "--output_dir", str(tmp_path)]))
    written = json.loads((tmp_path / "samplers_40.json").read_text())
    results = written["results"]
    assert written["settings"]["model_path"] == flags[1]
    assert set(results) == set(samplers.contestants(40))
    exact = results[samplers.BASE]
    assert (exact["forward passes"], exact["tokens"], exact["minus exact"]) == (20, 20 * 58, 0)
    assert results["exact, EOS stop"]["exact solves, %"] == exact["exact solves, %"]
    dual, prefix = results["cached: dual"], results["cached: prefix"]
    assert dual["tokens"] < prefix["tokens"] < exact["tokens"]
    for row in results.values():
        assert row["times fewer tokens"] == pytest.approx(exact["tokens"] / row["tokens"])
    assert "| parallel: entropy" in (tmp_path / "samplers_40.md").read_text()


def test_a_batch_that_is_kept_full_takes_fewer_passes_for_the_same_tokens(tmp_path, capsys):
    flags = ["--model_path", str(Path(__file__).parents[2] / "pocket" / "base"), "--problems", "14", "--batch", "3"]
    batching.main(batching.make_parser().parse_args([*flags, "--gen_length", "16", "--output_dir", str(tmp_path)]))
    results = json.loads((tmp_path / "batching.json").read_text())["results"]
    for way in batching.WAYS:
        fixed, full = (results[f"{way}: {name}"] for name in (batching.FIXED, batching.FULL))
        assert fixed["tokens fed"] == full["tokens fed"]
        assert fixed["forward passes"] * fixed["batch in use, %"] == pytest.approx(
            full["forward passes"] * full["batch in use, %"]
        )
        assert full["forward passes"] <= fixed["forward passes"]
    assert full["forward passes"] < fixed["forward passes"]


@pytest.mark.parametrize("flag", ["--repeats", "--batch"])
def test_what_makes_no_sense_is_refused_before_a_model_is_loaded(flag):
    with pytest.raises(ValueError, match=f"{flag} must be at least 1"):
        samplers.main(samplers.make_parser().parse_args(["--model_path", "nowhere", flag, "0"]))
