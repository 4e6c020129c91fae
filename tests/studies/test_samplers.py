"""The studies of samplers, rollouts, editing and staleness: fresh problems, choices, counted work, a small run."""

import random
import re
import shutil

import pytest

from d1.models import load_model, load_tokenizer
from d1.tasks import load_task
from pocket.recipes import ROOT
from studies.editing.search import gains
from studies.json_lines import read_lines
from studies.samplers import frontier
from studies.samplers.measure import FRESH, measured
from studies.samplers.rollouts import line
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


def test_the_choice_is_the_cheapest_within_a_point_and_what_is_judged_the_frontiers():
    settings = {
        frontier.EXACT: (70, 16, 800),
        frontier.ONE_BLOCK: (74, 16, 790),
        "no cache, a": (69, 3, 150),  # the cheapest within a point
        "no cache, b": (68, 2, 100),
        "no cache, c": (67, 2, 120),  # worse than b in everything
        "dual, d": (75, 4, 90),
        "dual, e": (59, 1, 20),  # more than ten points below exact
        "dual, f": (74, 3, 95),  # fewer passes than d, more tokens
    }
    lines = [samplers(settings)]
    assert frontier.chosen(lines, frontier.EXACT) == frontier.chosen(lines, frontier.ONE_BLOCK) == "dual, d"
    assert frontier.judged(lines) == [*list(settings)[:4], "dual, d", "dual, f"]
    rest = samplers({name: of for name, of in settings.items() if name != "dual, d"})
    assert frontier.chosen([rest], frontier.EXACT) == "dual, f"
    assert frontier.chosen([samplers({name: settings[name] for name in frontier.REFERENCES})], frontier.EXACT) is None


def test_work_is_counted_and_lines_are_written_once(tmp_path, monkeypatch):
    small = {
        "DATA": tmp_path / "frontier.jsonl",
        "TASKS": ("arithmetic",),
        "SEEDS": (0, 1),
        "VALIDATION": 20,
        "TEST": 10,
    }
    few = {name: of for name, of in frontier.settings().items() if name in frontier.REFERENCES or of.get("steps") == 2}
    few = dict([*few.items()][:2] + [*few.items()][2::24])
    for name, value in (small | {"teacher": lambda *_: BASE, "settings": lambda: few}).items():
        monkeypatch.setattr(frontier, name, value)
    args = frontier.make_parser().parse_args(["--output_dir", str(tmp_path)])
    frontier.main(args)
    lines = read_lines(frontier.DATA)
    assert [(one["seed"], one["split"]) for one in lines] == [
        *((s, "validation") for s in (0, 1)),
        (0, "test"),
        (1, "test"),
    ]
    exact = lines[0]["samplers"][frontier.EXACT]
    assert (exact["passes"], exact["computed"], len(exact["solved"])) == (16, 16 * (24 + 32), 20)
    both = [{name: of | {"seconds": 0} for name, of in one["samplers"].items()} for one in lines[:2]]
    assert both[0] == both[1]
    assert {*frontier.REFERENCES} <= {*lines[2]["samplers"]} <= {*few}
    frontier.main(args)
    assert read_lines(frontier.DATA) == lines


def test_gains_of_edits_are_over_the_best_that_is_as_fast():
    def result(solved, passes):
        return {"solved": solved, "passes": passes}

    unedited = [{0: result("0011", 2.0), 1: result("0001", 2.2)}, {0: result("1000", 1.0)}, {0: result("1111", 3.0)}]
    both = gains({1: result("0010", 2.5), 0: result("1011", 2.5)}, unedited)
    assert both.tolist() == [[0, 0, 1, -1], [1, 0, 0, 0]]
    assert gains({0: result("1011", 2.0)}, unedited).tolist() == [[0, 0, 1, 1]]  # 2.1 passes are more than 2
    assert gains({0: result("1111", 0.5)}, unedited).size == 0


def test_a_miniature_is_judged_by_both_samplers_and_leaves_only_its_start(tmp_path):
    shutil.copytree(BASE, tmp_path / "arithmetic_sft64" / "sft")
    (tmp_path / "arithmetic_sft64" / "done").touch()
    found = line({"stage": "trial", "arm": "lasting, two steps per view", "seed": 64}, tmp_path, limit=8, steps=2)
    assert (found["error"], found["steps"], len(found["sampled"])) == (None, 2, 2)
    assert {by: len(right) for by, right in found["right"].items()} == {"exact": 8, "own": 8}
    assert found["compute"] > 2 * 64 * found["completion_tokens"] > 0
    assert [path.name for path in tmp_path.iterdir()] == ["arithmetic_sft64"]


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
