"""The study of samplers: fresh problems, frontiers, what is chosen and judged, counts of work, its lines."""

import random
import re
from pathlib import Path

import pytest

from d1.models import load_model, load_tokenizer
from d1.sampling import SamplingSettings
from d1.tasks import load_task
from studies.json_lines import read_lines
from studies.samplers import frontier
from studies.samplers.measure import FRESH, measured

BASE = Path(__file__).parents[2] / "pocket" / "arithmetic_base"


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


def line(counts):
    """Of settings with a number of right answers of 100, passes and computed tokens."""
    names = ("solved", "passes", "computed")
    texts = {name: ("1" * right + "0" * (100 - right), *work) for name, (right, *work) in counts.items()}
    return {"samplers": {name: dict(zip(names, of, strict=True)) for name, of in texts.items()}}


def test_the_frontier_is_what_no_other_setting_beats_in_the_mean_of_the_seeds():
    rng = random.Random(3)
    points = {f"s{i}": (rng.randrange(100), rng.randrange(1, 40), rng.randrange(1, 40)) for i in range(60)}
    lines = [line(points), line({name: (right, p + 2, c) for name, (right, p, c) in points.items()})]
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
    lines = [line(settings)]
    assert frontier.chosen(lines, frontier.EXACT) == frontier.chosen(lines, frontier.ONE_BLOCK) == "dual, d"
    assert frontier.judged(lines) == [*list(settings)[:4], "dual, d", "dual, f"]
    rest = line({name: of for name, of in settings.items() if name != "dual, d"})
    assert frontier.chosen([rest], frontier.EXACT) == "dual, f"
    assert frontier.chosen([line({name: settings[name] for name in frontier.REFERENCES})], frontier.EXACT) is None


def test_every_setting_can_be_sampled_with():
    found = frontier.settings()
    assert len({str(options) for options in found.values()}) == len(found)
    for options in found.values():
        settings = {"steps": frontier.LENGTH // 2, **options}
        SamplingSettings(frontier.LENGTH, settings.pop("block"), settings.pop("steps"), **settings)


def test_work_is_counted_and_lines_are_written_once(tmp_path, monkeypatch):
    monkeypatch.setattr(frontier, "DATA", tmp_path / "frontier.jsonl")
    monkeypatch.setattr(frontier, "teacher", lambda *_: BASE)
    monkeypatch.setattr(frontier, "TASKS", ("arithmetic",))
    monkeypatch.setattr(frontier, "SEEDS", (0, 1))
    monkeypatch.setattr(frontier, "VALIDATION", 20)
    monkeypatch.setattr(frontier, "TEST", 10)
    few = {name: of for name, of in frontier.settings().items() if name in frontier.REFERENCES or of.get("steps") == 2}
    few = dict([*few.items()][:2] + [*few.items()][2::24])
    monkeypatch.setattr(frontier, "settings", lambda: few)
    args = frontier.make_parser().parse_args(["--output_dir", str(tmp_path)])
    frontier.main(args)
    lines = read_lines(frontier.DATA)
    assert [(one["seed"], one["split"]) for one in lines] == [
        (0, "validation"),
        (1, "validation"),
        (0, "test"),
        (1, "test"),
    ]
    exact = lines[0]["samplers"][frontier.EXACT]
    assert (exact["passes"], exact["computed"], len(exact["solved"])) == (16, 16 * (24 + 32), 20)
    assert lines[0]["samplers"] == {
        name: of | {"seconds": lines[0]["samplers"][name]["seconds"]} for name, of in lines[1]["samplers"].items()
    }
    assert {*frontier.REFERENCES} <= {*lines[2]["samplers"]} <= {*few}
    frontier.main(args)
    assert read_lines(frontier.DATA) == lines


def test_a_completion_stops_after_its_eos():
    """Fewer passes than blocks and steps, with the tokens of the whole canvas up to there."""
    model, tokenizer = load_model(str(BASE)).eval(), load_tokenizer(str(BASE))
    rows = FRESH["arithmetic"](20, 0)
    found = measured(model, tokenizer, rows, "arithmetic", 48, {"exact": {"block": 8}})["exact"]
    assert found["tokens"] <= 40
    assert found["passes"] < 24
    assert found["computed"] == pytest.approx(found["passes"] * (24 + 48), rel=1e-4)
