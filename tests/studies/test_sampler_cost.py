"""The table of samplers: fresh problems, paired differences, work relative to the exact sampler's."""

import json
import math
import random
import re
from pathlib import Path

import pytest

from d1.sampling import SamplingSettings
from d1.tasks import load_task
from studies.samplers import cost, search
from studies.samplers.fresh import FRESH


def test_problems_are_new_and_on_grids_that_no_training_sees():
    rows = FRESH["sudoku"](300, seed=5)
    assert len({row["question"] for row in rows}) == 300
    solutions = set(rows["ground_truth"])
    task = load_task("sudoku")
    for split in ("train", "validation"):
        assert not solutions & set(task.load_rows(split)["ground_truth"])
    known = set(task.load_rows("test")["question"])
    assert sum(row["question"] in known for row in rows) < 30


def test_fresh_word_problems_are_on_test_numbers_and_countdown_has_no_more_than_its_test_set():
    rows = FRESH["arithmetic"](600, seed=1)
    numbers = {split: numbers_of(load_task("arithmetic").load_rows(split)) for split in ("train", "validation", "test")}
    assert len(rows) == 600 == len(set(rows["question"]))
    assert numbers_of(rows) == numbers["test"]
    assert not numbers["test"] & (numbers["train"] | numbers["validation"])
    test = load_task("pocket_countdown").load_rows("test")
    assert FRESH["countdown"](5000, seed=1)["question"] == test["question"]
    assert set(FRESH["countdown"](40, seed=1)["question"]) < set(test["question"])


def numbers_of(rows):
    """The start and the sorted operands of each word problem."""
    words = {"doubles": "2", "triples": "3"}
    found = [[words.get(w, w) for w in re.findall(r"\d+|doubles|triples", text)] for text in rows["question"]]
    return {(start, *sorted(operands)) for start, *operands in found}


def tried(tokens, accuracy, **options):
    return search.Tried(options, accuracy, tokens)


def test_the_frontier_is_what_no_other_beats_and_the_choice_the_cheapest_that_is_good_enough():
    rng = random.Random(0)
    every = [tried(rng.randrange(1, 40), rng.randrange(100)) for _ in range(60)]
    best = search.frontier(every)
    points = {(t.tokens, t.accuracy) for t in every}
    unbeaten = {(x, y) for x, y in points if not any(u <= x and v >= y and (u, v) != (x, y) for u, v in points)}
    assert {(t.tokens, t.accuracy) for t in best} == unbeaten
    assert 1 < len(best) < 20
    assert [t.tokens for t in best] == sorted(t.tokens for t in best)
    exact = tried(800, 70.0)
    some = [tried(50, 60.0), tried(90, 69.0), tried(80, 69.5), tried(70, 68.9), tried(200, 75.0)]
    assert search.choice(some, exact) == some[2]
    assert search.choice(some[:1], exact) is None
    assert search.near([tried(50, 60.0, n=1), tried(60, 55.0, n=2), tried(60, 54.9, n=3)]) == [
        {"n": 1},
        {"n": 2},
    ]


def test_every_setting_of_the_grid_can_be_sampled_with():
    found = search.grid(32)
    assert len({str(options) for options in found}) == len(found)
    for options in found:
        block, steps, sampler = options["block"], options["steps"], {**options}
        del sampler["block"], sampler["steps"]
        SamplingSettings(32, block, steps, **sampler)


def test_a_margin_is_half_of_the_normal_interval():
    mean, margin = cost.with_margin([1.0] * 75 + [0.0] * 25)
    assert mean == pytest.approx(75)
    assert margin == pytest.approx(100 * 1.959964 * math.sqrt(0.75 * 0.25 / 99), rel=1e-5)


def test_the_table_holds_every_sampler_and_counts_its_work(tmp_path, capsys):
    flags = ["--model_path", str(Path(__file__).parents[2] / "pocket" / "base"), "--problems", "6", "--repeats", "1"]
    cost.main(cost.make_parser().parse_args([*flags, "--gen_length", "40", "--output_dir", str(tmp_path)]))
    written = json.loads((tmp_path / "samplers_sudoku_40.json").read_text())
    results = written["results"]
    assert written["settings"]["model_path"] == flags[1]
    assert set(results) == set(cost.contestants(40))
    exact = results[cost.BASE]
    assert (exact["forward passes"], exact["tokens"], exact["minus exact"]) == (20, 20 * 58, 0)
    assert results["exact, EOS stop"]["exact solves, %"] == exact["exact solves, %"]
    dual, prefix = results["cached: dual"], results["cached: prefix"]
    assert dual["tokens"] < prefix["tokens"] < exact["tokens"]
    for row in results.values():
        assert row["times fewer tokens"] == pytest.approx(exact["tokens"] / row["tokens"])
    assert "| parallel: entropy" in (tmp_path / "samplers_sudoku_40.md").read_text()


def test_a_search_chooses_on_validation_problems_and_judges_on_others(tmp_path, capsys, monkeypatch):
    few = [options for options in search.grid(40) if options["block"] == 40 and options["steps"] == 2][::24]
    monkeypatch.setattr(search, "grid", lambda _: few)
    flags = ["--model_path", str(Path(__file__).parents[2] / "pocket" / "arithmetic_base"), "--task", "arithmetic"]
    flags += ["--problems", "6", "--repeats", "1", "--validation", "20", "--gen_length", "40"]
    search.main(search.make_parser().parse_args([*flags, "--output_dir", str(tmp_path)]))
    results = json.loads((tmp_path / "frontier_arithmetic_40.json").read_text())["results"]
    assert results[cost.BASE]["tokens"] == 20 * (24 + 40)
    assert (tmp_path / "frontier_arithmetic_40.png").stat().st_size > 5000
    names = [name.removeprefix("chosen: ") for name in results if name != cost.BASE]
    assert set(names) <= {search.Tried(options, 0.0, 0.0).name for options in few}


@pytest.mark.parametrize("flag", ["--repeats", "--batch"])
def test_what_makes_no_sense_is_refused_before_a_model_is_loaded(flag):
    with pytest.raises(ValueError, match=f"{flag} 0"):
        cost.main(cost.make_parser().parse_args(["--model_path", "nowhere", flag, "0"]))
