"""The studies of samplers, editing and staleness: fresh problems, frontiers, counted work."""

import random
import re

import pytest

from d1.models import load_model, load_tokenizer
from d1.tasks import load_task
from pocket.recipes import ROOT
from studies.editing.search import gains
from studies.samplers import frontier
from studies.samplers.measure import FRESH, measured
from studies.staleness.run import free_seconds

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


def test_gains_of_edits_are_over_the_best_that_is_as_fast():
    def result(solved, passes):
        return {"solved": solved, "passes": passes}

    unedited = [{0: result("0011", 2.0), 1: result("0001", 2.2)}, {0: result("1000", 1.0)}, {0: result("1111", 3.0)}]
    both = gains({1: result("0010", 2.5), 0: result("1011", 2.5)}, unedited)
    assert both.tolist() == [[0, 0, 1, -1], [1, 0, 0, 0]]
    assert gains({0: result("1011", 2.0)}, unedited).tolist() == [[0, 0, 1, 1]]  # 2.1 passes are more than 2
    assert gains({0: result("1111", 0.5)}, unedited).size == 0


def schedule(rollout, update, rollouts, staleness):
    """When the last update ends: rollout k needs the weights before update max(0, k - staleness)."""
    sampled, updated = [], []
    for number in range(rollouts):
        weights = max(0, number - staleness)
        ready = updated[weights - 1] if weights else 0.0
        sampled.append(max(ready, sampled[-1] if sampled else 0.0) + rollout)
        updated.append(max(sampled[-1], updated[-1] if updated else 0.0) + update)
    return updated[-1]


@pytest.mark.parametrize("staleness", [0, 1, 2])
@pytest.mark.parametrize("rollout", [0.25, 1.0, 4.0])
def test_seconds_on_two_free_cores_are_those_of_the_schedule(rollout, staleness):
    found = free_seconds(20 * 1.0, 20 * rollout, 20, staleness)
    assert found == pytest.approx(schedule(rollout, 1.0, 20, staleness))
