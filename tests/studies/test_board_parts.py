"""The leaderboard's variants of rows, and its parts that wait for the search."""

import json
from dataclasses import replace
from pathlib import Path

import pytest

from d1.rl.methods import METHODS
from d1.rl.train import make_parser
from pocket.make_base import build_model, widened
from pocket.recipes import RECIPES
from pocket.tokenizer import build_tokenizer
from studies.leaderboard.plan import (
    ALL_TASKS,
    CANDIDATES,
    CHANGES,
    FULL,
    LAST_CHANGES,
    PARTS,
    SEARCHED,
    SETUPS,
    START,
    TASKS,
    WIDTH,
    Choice,
    Run,
    combined,
    ranking,
    updates_of,
    written_values,
)
from studies.leaderboard.run import check_bases, main
from studies.leaderboard.run import make_parser as board_parser
from studies.leaderboard.variants import REST, TRACERL, changes, values_of, way

ROOT = Path(__file__).parents[2]
SUDOKU = SETUPS["sudoku-sft"]


VARIANTS = [*way("d1", "tracerl"), *(f"rldf, {change}" for change in CHANGES)]
VARIANTS += [f"rldf, {TRACERL}, {change}" for change in LAST_CHANGES]


@pytest.mark.parametrize("name", VARIANTS)
def test_a_variant_runs_with_exactly_the_values_of_its_name(name, tmp_path):
    mu = updates_of(name)[0]
    run = Run("tuning", *SUDOKU, name, 1, 3e-5, mu, 5000)
    flags = ["--config", str(ROOT / "diffu-grpo" / "pocket.yaml"), *run.settings(), "--output_dir", str(tmp_path)]
    config, _ = make_parser().parse_args_and_config([*flags, "--model_path", str(TASKS["sudoku"].base)])
    values = values_of(name) | {"num_iterations": mu}
    assert {setting: getattr(config, setting) for setting in values} == values
    assert written_values(name) == json.loads(json.dumps(values_of(name)))
    assert len(run.name) < 180  # of the 255 bytes of a file name; evaluations add the task and more


@pytest.mark.parametrize("name", CANDIDATES)
def test_a_candidate_is_the_variant_that_was_searched(name):
    assert values_of(name) == values_of(CANDIDATES[name])
    runs, _ = FULL.tuning({}, SUDOKU, name)
    assert {run.method for run in runs} == {CANDIDATES[name]}


def test_long_names_differ_as_their_variants_do():
    long = f"rldf, {CHANGES[-2]}"
    names = [Run("tuning", *SUDOKU, long + end, 1, 3e-5, 4, 5000).name for end in ("", ", beta=0", ", beta=1")]
    assert len({*names}) == 3


@pytest.mark.parametrize("end", ["tracerl", "coupled-grpo", "agrpo-entropy"])
def test_the_way_begins_at_one_row_and_ends_at_the_other(end):
    found = changes("d1", end)
    assert values_of(f"d1 > {end}: {', '.join(found)}") == METHODS["d1"].values | METHODS[end].values
    names = way("d1", end)
    assert len(names) == len({*names})
    for name in names:
        ideas = name.partition(": ")[2].split(", ")
        assert len(ideas) == 1 or ideas == [*found][: len(ideas)] or ideas == ["prompt", REST]
        assert values_of(name) != values_of(end)
        assert updates_of(name) == updates_of(end if REST in ideas else "d1")


def whole_search(best):
    """Results in which the search of the whole board is complete and `best` has the highest score."""
    results = {}
    while todo := [run for run in FULL.missing(results) if run.stage == "tuning"]:
        for run in todo:
            place = [*METHODS, *CANDIDATES.values()].index(run.method)
            score = 60 + 20 * (run.method == best) - place - 5 * (run.learning_rate != 3e-4)
            results[run] = {"validation": {"exact": f"{'1' * score:0<100}"}}
    return results


def test_the_parts_compare_what_the_search_found_best():
    results = whole_search("tracerl")
    assert ranking(results)[:3] == ["tracerl", "d1", "wd1"]
    protocol = PARTS["way"](results)
    assert protocol.methods == ("d1", *way("d1", "tracerl"), "tracerl")
    protocol = PARTS["scale"](results)
    assert protocol.methods == ("d1", "tracerl", *[*METHODS][1:5])
    runs = protocol.missing(results)
    assert {(run.task, run.start) for run in runs} == {("large-sudoku", "sft")}
    assert {run.stage for run in runs if run.method != START} == {"tuning"}
    protocol = PARTS["candidates"](results)
    assert protocol.missing(results) == [run for run in protocol.missing(results) if run.stage == "tuning"]
    assert protocol.methods == ("tracerl", *(f"tracerl, {change}" for change in CHANGES))
    with pytest.raises(ValueError, match="the board's search is not complete: d1, sudoku-sft needs 6 more runs"):
        PARTS["way"]({})


def test_the_changes_that_help_are_combined():
    solved = {
        "row": 50,
        "row, a=1": 60,
        "row, b=2": 55,
        "row, b=3, c=1": 58,
        "row, d=1": 49,
        "row, e=1": 52,
        "row, f=1": 51,
    }
    every = "row, a=1, b=3, c=1, e=1, f=1"
    assert combined(solved) == (every, "row, a=1, b=3, c=1, e=1", "row, a=1, b=3, c=1")
    assert combined({"row": 50, "row, a=1": 60, "row, b=2": 55}) == ("row, a=1, b=2",)
    assert combined({"row": 50, "row, a=1": 60, "row, b=2": 50}) == ()


def test_combinations_are_searched_after_the_changes_alone():
    results = whole_search("tracerl")
    alone = PARTS["candidates"](results).methods
    better = ("tracerl, beta=0", "tracerl, num_iterations=8, split_views=true")
    while todo := PARTS["candidates"](results).missing(results):
        assert {run.setup.label for run in todo} <= {*SEARCHED}
        for run in todo:
            score = 60 + 30 * (run.method in better) - 5 * (run.learning_rate != 3e-4)
            results[run] = {"validation": {"exact": f"{'1' * score:0<100}"}}
    both = "tracerl, beta=0, num_iterations=8, split_views=true"
    last = [f"tracerl, beta=0, {change}" for change in LAST_CHANGES]  # of equal scores, the first one's
    assert PARTS["candidates"](results).methods == (*alone, both, *last)
    searched = {run.method: run.num_iterations for run in results if run.method in (*better, both, last[-2])}
    assert searched == {better[0]: 4, better[1]: 8, both: 8, last[-2]: 8}


def test_every_method_of_a_part_gets_every_seed():
    protocol = PARTS["way"](whole_search("tracerl"))
    chosen = {(SUDOKU, method): Choice(1e-4, 1, 0.1 * number) for number, method in enumerate(protocol.methods)}
    runs = [run for run in protocol.final(chosen) if run.method != START]
    assert len(runs) == len({*runs}) == 8 * len(protocol.methods)
    assert {run.budget for run in runs} == {1_500_000}


def test_a_part_without_its_base_model_or_its_search_says_what_to_do(tmp_path, monkeypatch):
    monkeypatch.setitem(ALL_TASKS, "large-sudoku", replace(TASKS["sudoku"], base=tmp_path / "large"))
    command = rf"python -m pocket.make_base --task sudoku --hidden_size {WIDTH} --output_dir {tmp_path / 'large'}"
    with pytest.raises(FileNotFoundError, match=command):
        check_bases(PARTS["scale"](whole_search("tracerl")))
    check_bases(FULL)
    with pytest.raises(ValueError, match="leave it out with --part way"):
        main(board_parser().parse_args(["--part", "way", "--setups", "sudoku-sft"]))


def test_the_large_model_is_the_small_ones_recipe_with_ten_times_the_parameters():
    recipe, tokenizer = RECIPES["sudoku"], build_tokenizer("sudoku")
    large = widened(recipe, WIDTH)
    assert replace(large, hidden_size=64, peak_lr=recipe.peak_lr) == recipe
    assert large.peak_lr == pytest.approx([rate * 64 / WIDTH for rate in recipe.peak_lr])
    small, wide = (build_model(tokenizer, 0, size.hidden_size).num_parameters() for size in (recipe, large))
    assert 2_000_000 < wide < 5_000_000
    assert wide > 9 * small
