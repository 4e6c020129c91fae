"""The study of samplers: fresh problems, frontiers, counted work."""

import random
import re

import pytest

from d1.models import load_model, load_tokenizer
from d1.tasks import load_task
from pocket.recipes import ROOT
from studies.samplers import frontier
from studies.samplers.measure import FRESH, measured

BASE = ROOT / "pocket" / "arithmetic_base"


def test_problems_are_new_and_on_grids_or_numbers_that_no_training_sees():
    rows, task = FRESH["sudoku"](300, seed=5), load_task("sudoku")
    assert len({row["question"] for row in rows}) == 300
    for split in ("train", "validation"):
        assert not set(rows["ground_truth"]) & set(task.load_rows(split)["ground_truth"])
    known = set(task.load_rows("test")["question"])
    assert sum(row["question"] in known for row in rows) < 30
    rows = FRESH["arithmetic"](600, seed=1)
    numbers = {split: numbers_of(load_task("arithmetic").load_rows(split)) for split in ("train", "validation", "test")}
    assert len(rows) == 600 == len(set(rows["question"]))
    assert numbers_of(rows) == numbers["test"]
    assert not numbers["test"] & (numbers["train"] | numbers["validation"])


def numbers_of(rows):
    """The start and the sorted operands of each word problem."""
    words = {"doubles": "2", "triples": "3"}
    found = [[words.get(w, w) for w in re.findall(r"\d+|doubles|triples", text)] for text in rows["question"]]
    return {(start, *sorted(operands)) for start, *operands in found}


def test_a_completion_stops_after_its_eos():
    """Fewer passes than blocks and steps, with the tokens of the whole canvas up to there."""
    model, tokenizer = load_model(str(BASE)).eval(), load_tokenizer(str(BASE))
    rows = FRESH["arithmetic"](20, 0)
    found = measured(model, tokenizer, rows, "arithmetic", 48, {"exact": {"block": 8}})["exact"]
    assert found["tokens"] <= 40
    assert found["passes"] < 24
    assert found["computed"] == pytest.approx(found["passes"] * (24 + 48), rel=1e-4)


def sampler(right, passes, computed, tokens=20.0):
    return {"solved": "1" * right + "0" * (100 - right), "passes": passes, "computed": computed, "tokens": tokens}


def samplers(counts):
    """The line of settings with a number of right answers of 100, passes and computed tokens."""
    return {"samplers": {name: sampler(*of) for name, of in counts.items()}}


def test_the_frontier_is_what_no_other_setting_beats_in_the_mean_of_the_seeds():
    rng = random.Random(3)
    points = {f"s{i}": (rng.randrange(100), rng.randrange(1, 40), rng.randrange(1, 40)) for i in range(60)}
    lines = [samplers(points), samplers({name: (right, p + 2, c) for name, (right, p, c) in points.items()})]
    best = frontier.frontier(lines, points, "computed")
    pairs = {(c, right) for right, _, c in points.values()}
    unbeaten = {(x, y) for x, y in pairs if not any(u <= x and v >= y and (u, v) != (x, y) for u, v in pairs)}
    assert {(points[name][2], points[name][0]) for name in best} == unbeaten
    assert 1 < len(best) < 20
    assert frontier.mean_over(lines, "s7", "passes") == points["s7"][1] + 1
