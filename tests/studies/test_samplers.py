"""The studies of samplers, rollouts, distillation, editing and staleness: fresh problems, choices, arms, small runs."""

import json
import random
import re
import shutil
from itertools import combinations
from pathlib import Path

import pytest

from d1.models import load_model, load_tokenizer
from d1.rl.methods import METHODS
from d1.rl.train import make_parser as rl_parser
from d1.sampling import SamplingSettings
from d1.tasks import load_task
from pocket.recipes import ROOT
from studies.distill.run import best_rate, for_goal
from studies.distill.run import chosen as chosen_of_model
from studies.editing.search import gains
from studies.json_lines import read_lines
from studies.samplers import frontier, rollouts
from studies.samplers.measure import FRESH, measured
from studies.samplers.rollouts import ARMS, CAUSES, STAGES, line, settings
from studies.staleness.run import Arm, flags_of, free_seconds

BASE = ROOT / "pocket" / "arithmetic_base"


# --- Problems, and what samplers do with them -------------------------------------------------------------------------


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


def test_every_setting_can_be_sampled_with():
    found = frontier.settings()
    assert len({str(options) for options in found.values()}) == len(found)
    for options in found.values():
        settings = {"steps": frontier.LENGTH // 2, **options}
        SamplingSettings(frontier.LENGTH, settings.pop("block"), settings.pop("steps"), **settings)


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


# --- Distillation and editing -----------------------------------------------------------------------------------------


def test_rates_are_chosen_by_area_and_samplers_by_tokens_or_passes():
    lines = [
        {"method": "t3d", "rate": 1e-4, **samplers({"a": (80, 10, 10), "b": (79, 5, 20)})},
        {"method": "t3d", "rate": 3e-4, **samplers({"a": (80, 10, 10), "b": (79, 2, 50)})},
    ]
    assert best_rate(lines, {"t3d": (1e-4, 3e-4), "d-opsd": (1e-4,)}) == {"t3d": 3e-4}
    assert best_rate(lines[:1], {"t3d": (1e-4, 3e-4)}) == {}
    found = samplers({"a": (80, 10, 10), "b": (78, 5, 20), "c": (60, 1, 100)})["samplers"]
    seeds = [{"validation": found}] * 2
    assert chosen_of_model(seeds, 79.0, "passes") == chosen_of_model(seeds, 79.0) == "a"
    assert [chosen_of_model(seeds, 78.0, "passes"), chosen_of_model(seeds, 78.0)] == ["b", "a"]
    assert chosen_of_model(seeds, 90.0, "passes") == "a"


def test_the_goal_is_tried_with_the_most_accurate_sampler_that_is_cheap_enough():
    """A pass computes ten tokens here; the best undistilled sampler takes 8 passes, exact computes 160 tokens."""

    def line(**of):
        return {"validation": {name: sampler(right, passes, 10 * passes) for name, (right, passes) in of.items()}}

    start = [line(exact=(80, 16), fast=(79, 8), faster=(70, 2))] * 3
    own = [line(a=(95, 4.1), b=(90, 1.6), c=(85, 1.5), d=(99, 16))] * 3
    assert for_goal(start, {"t3d": own, "d-opsd": []}, "exact") == ("fast", "t3d", "b")
    assert for_goal(start, {"t3d": own, "dparallel": [line(e=(91, 1.0))]}, "exact") == ("fast", "dparallel", "e")
    assert for_goal(start, {"t3d": [line(a=(95, 4.1), b=(90, 1.7))]}, "exact") is None
    assert for_goal([line(exact=(80, 16), fast=(79, 3))], {"t3d": own}, "exact") == ("fast", "t3d", "c")


def test_gains_of_edits_are_over_the_best_that_is_as_fast():
    def result(solved, passes):
        return {"solved": solved, "passes": passes}

    unedited = [{0: result("0011", 2.0), 1: result("0001", 2.2)}, {0: result("1000", 1.0)}, {0: result("1111", 3.0)}]
    both = gains({1: result("0010", 2.5), 0: result("1011", 2.5)}, unedited)
    assert both.tolist() == [[0, 0, 1, -1], [1, 0, 0, 0]]
    assert gains({0: result("1011", 2.0)}, unedited).tolist() == [[0, 0, 1, 1]]  # 2.1 passes are more than 2
    assert gains({0: result("1111", 0.5)}, unedited).size == 0


# --- Rollouts ---------------------------------------------------------------------------------------------------------


def config_of(flags, folder):
    places = ["--model_path", str(folder), "--output_dir", str(folder)]
    return vars(rl_parser().parse_args_and_config([*places, *flags])[0])


def differing(one, other):
    return {name: other[name] for name in other if one[name] != other[name]} | {"distributed_state": None}


def test_the_arms_differ_by_one_setting_or_by_their_sampler_and_steps_alone(tmp_path):
    lasting, *others = (config_of(settings(arm, 7), tmp_path) for arm in (ARMS["lasting"], *CAUSES.values()))
    causes = {"max_grad_norm": 0.2, "temperature": 0.9, "segment_steps": 2, "learning_rate": 1e-4}
    found = [differing(lasting, other) for other in others]
    assert found == [{name: value, "distributed_state": None} for name, value in causes.items()]
    arms = [arm for stage in STAGES.values() for name, arm in stage.arms.items() if name not in CAUSES]
    configs = [config_of(settings(arm, 7), tmp_path) for arm in arms]
    assert [config["max_steps"] for config in configs] == [arm.steps for arm in arms]
    sampling = {"sampler", "kv_cache", "reveal", "reveal_level"}
    for one, other in combinations(configs, 2):
        assert differing(one, other).keys() <= {*sampling, "max_steps", "distributed_state"}
    own = METHODS["tracerl"].values | {"num_iterations": 1, "split_views": False, "learning_rate": 2e-4}
    own |= {"block_length": 8, "diffusion_steps": 16, "max_completion_length": 32, "sampler": "exact"}
    assert {name: configs[0][name] for name in own} == own
    seeds = [seed for stage in STAGES.values() for seed in stage.seeds]
    assert len({*seeds}) == len(seeds) == 24
    assert min(seeds) > 31  # those before


@pytest.fixture
def sft_model(tmp_path):
    """A folder with the SFT model of seed 64."""
    shutil.copytree(BASE, tmp_path / "arithmetic_sft64" / "sft")
    (tmp_path / "arithmetic_sft64" / "done").touch()
    return tmp_path


@pytest.mark.parametrize(("stage", "name"), [("test", "exact"), ("trial", "lasting, two steps per view")])
def test_a_miniature(stage, name, sft_model):
    found = line({"stage": stage, "arm": name, "seed": 64}, sft_model, limit=8, steps=2)
    found = json.loads(json.dumps(found))
    assert (found["error"], found["steps"], len(found["sampled"])) == (None, 2, 2)
    judges = ["exact", "own"] if stage == "trial" else ["exact"]
    assert {by: len(right) for by, right in found["right"].items()} == dict.fromkeys(judges, 8)
    assert found["compute"] > 2 * 64 * found["completion_tokens"] > 0
    assert found["processor_seconds"] > 0
    assert [path.name for path in sft_model.iterdir()] == ["arithmetic_sft64"]
    assert {*STAGES[stage].arms[name].sampler} < {*found["settings"]}


def test_a_run_that_did_not_stay_finite_has_solved_nothing(sft_model, monkeypatch):
    def failing(name, flags):
        (sft_model / name).mkdir()
        return "the loss became nan"

    monkeypatch.setattr(rollouts, "train", failing)
    found = line({"stage": "trial", "arm": "lasting", "seed": 64}, sft_model, limit=8)
    assert found["right"] == {"exact": "0" * 8, "own": "0" * 8}
    assert (found["error"], found["steps"]) == ("the loss became nan", 0)


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


def test_the_arms_of_rollouts_ahead_differ_by_staleness_and_rollouts_alone(tmp_path):
    flags = [flags_of("sudoku", arm, 0, "http://127.0.0.1:1", Path("runs")) for arm in (Arm(0, 24), Arm(1, 44))]
    one, other = (config_of(of, tmp_path) for of in flags)
    assert differing(one, other).keys() == {"rollout_staleness", "max_steps", "distributed_state"}
