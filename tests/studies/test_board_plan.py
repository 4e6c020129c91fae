"""The leaderboard's protocol as code: what a run is, the search, the final runs, variants of methods."""

import itertools
import json
from dataclasses import asdict, replace
from pathlib import Path

import pytest

from d1.eval.run import make_parser as eval_parser
from d1.rl.methods import METHODS
from d1.rl.train import make_parser
from pocket.make_base import build_model, widened
from pocket.recipes import RECIPES
from pocket.tokenizer import build_tokenizer
from studies.json_lines import append_line
from studies.leaderboard import plan
from studies.leaderboard.plan import FULL, LADDER, SETUPS, START, TASKS, Choice, Run
from studies.leaderboard.variants import TRACERL, values_of, way

ROOT = Path(__file__).parents[2]
SUDOKU = SETUPS["sudoku-sft"]


# --- What a run is ----------------------------------------------------------------------------------------------------


def config_of(run, folder):
    flags = ["--config", str(ROOT / "diffu-grpo" / "pocket.yaml"), *run.settings(), "--output_dir", str(folder)]
    config, _ = make_parser().parse_args_and_config([*flags, "--model_path", str(TASKS[run.task].base)])
    return config


@pytest.mark.parametrize(("method", "task"), zip(METHODS, itertools.cycle(TASKS), strict=False))
def test_each_run_is_its_method_at_the_budget_rate_and_mu_that_it_names(method, task, tmp_path):
    recipe, length, values = RECIPES[task], TASKS[task].length, METHODS[method].values
    run = Run("final", task, "sft", method, 1, 3e-5, 2, 5000)
    config = config_of(run, tmp_path)
    expected = values | {
        "num_iterations": 2,
        "diffusion_steps": values.get("diffusion_steps", length // 2) or length,
        "block_length": values.get("block_length", 8),
        "learning_rate": 3e-5,
        "lr_scheduler_kwargs": {},
        "warmup_steps": 0,
        "num_generations": 8,
        "max_compute_tokens": 5000,
        "seed": 1,
        "dataset": recipe.task,
        "max_prompt_length": recipe.prompt_tokens,
        "max_completion_length": recipe.lengths[0],
        "weight_decay": 0.1,
        "adam_beta2": 0.99,
    }
    assert {name: getattr(config, name) for name in expected} == expected
    assert config.lr_scheduler_type.value == "linear"
    assert config.per_device_train_batch_size * config.gradient_accumulation_steps == 64
    assert config.max_steps >= 5000  # a step takes a token at least
    assert str(ROOT) not in " ".join(run.settings())


VARIANTS = [*way("d1", "tracerl"), *(f"rldf, {change}" for change in plan.CHANGES)]
VARIANTS += [f"rldf, {TRACERL}, {change}" for change in plan.LAST_CHANGES]


@pytest.mark.parametrize("name", VARIANTS)
def test_a_variant_runs_with_exactly_the_values_of_its_name(name, tmp_path):
    mu = plan.updates_of(name)[0]
    run = Run("tuning", *SUDOKU, name, 1, 3e-5, mu, 5000)
    config, values = config_of(run, tmp_path), values_of(name) | {"num_iterations": mu}
    assert {setting: getattr(config, setting) for setting in values} == values
    assert plan.written_values(name) == json.loads(json.dumps(values_of(name)))
    assert len(run.name) < 180  # of the 255 bytes of a file name; evaluations add the task and more
    assert run.name != replace(run, method=f"{name}, beta=7").name


@pytest.mark.parametrize("method", METHODS)
def test_the_own_sampler_is_that_of_the_methods_rollouts(method):
    values, length = METHODS[method].values, TASKS["sudoku"].length
    flags = plan.own_sampler(method, length)
    common = ["--model_path", "m", "--dataset", "sudoku", "--gen_length", str(length), "--block_length", "8"]
    judge, own = (vars(eval_parser().parse_args([*common, *more])) for more in ([], flags or []))
    differing = {name for name in own if own[name] != judge[name]}
    assert (flags is None) == (not differing)
    for name in plan.OWN:
        if name in values:
            assert own[name] == (length if values[name] is None and name == "diffusion_steps" else values[name])
    assert differing <= {*plan.OWN}
    assert own["temperature"] == 0


# --- The search -------------------------------------------------------------------------------------------------------


def searched(score, method="d1", **changes):
    """The search's result if (rate, mu, seed) scores `score`: the cells tried with each seed, and its choice."""
    protocol, results = replace(FULL, methods=(method,), setups=(SUDOKU,), **changes), {}
    for _ in range(50):
        runs, choice = protocol.tuning(results, SUDOKU, method)
        assert (not runs) == (choice is not None)
        if choice:
            tried = {100: set(), 101: set()}
            for run in results:
                tried[run.seed].add((run.learning_rate, run.num_iterations))
            return tried, choice
        for run in runs:
            assert (run.stage, run.budget, run.start, run not in results) == ("tuning", 1_500_000, "sft", True)
            right = round(1000 * score(run.learning_rate, run.num_iterations, run.seed))
            results[run] = {"validation": {"exact": "1" * right + "0" * (1000 - right)}}
    raise AssertionError("the search does not end")


def peak(at, slope=0.05):
    """A score that falls by `slope` for each step on the ladder of rates from `at`."""
    return lambda rate: 0.7 - slope * abs(LADDER.index(rate) - LADDER.index(at))


def test_a_peak_inside_the_grid_needs_no_other_rate():
    tried, choice = searched(lambda rate, mu, seed: peak(1e-4)(rate) - 0.2 * (mu == 4))
    assert tried[100] == {(rate, mu) for rate in (3e-5, 1e-4, 3e-4) for mu in (1, 4)}
    assert tried[101] == {(1e-4, 1)}  # the others are more than 4 points behind
    assert choice == Choice(1e-4, 1, 0.7)


@pytest.mark.parametrize(("at", "last"), [(1e-5, 3e-6), (3e-3, 1e-2), (1e-6, 1e-6), (1e-2, 1e-2)])
def test_rates_are_extended_until_the_best_is_inside_or_at_the_limits(at, last):
    tried, choice = searched(lambda rate, mu, seed: peak(at)(rate), method="just-grpo")
    assert choice[:2] == (at, 1)
    rates = sorted(rate for rate, _ in tried[100])
    assert rates == [rate for rate in LADDER if min(last, 3e-5) <= rate <= max(last, 3e-4)]


@pytest.mark.parametrize(("gap", "lowest"), [(0.02, 3e-6), (0.25, 3e-5)])
def test_a_mu_is_extended_unless_it_is_far_behind(gap, lowest):
    """The best of mu 1 in the grid is 7 or 30 points behind that of mu 4."""
    tried, choice = searched(lambda rate, mu, seed: peak(1e-4 if mu == 4 else 1e-5)(rate) - gap * (mu == 1), far=0.2)
    assert choice[:2] == (1e-4, 4)
    assert min(rate for rate, mu in tried[100] if mu == 1) == lowest


def test_two_seeds_decide_among_the_near_and_extend_once_more():
    def score(rate, mu, seed):
        if seed == 101 and rate == 1e-4:
            return 0.75
        return {1e-4: 0.68, 3e-4: 0.7, 1e-3: 0.5, 3e-5: 0.6}[rate] - 0.3 * (mu == 4)

    tried, choice = searched(score)
    assert tried[101] == {(1e-4, 1), (3e-4, 1)}
    assert (3e-5, 1) in tried[100]  # at the edge by the mean of both seeds
    assert choice == (1e-4, 1, pytest.approx((0.68 + 0.75) / 2))
    _, choice = searched(lambda rate, mu, seed: 0.3 if rate >= 1e-5 else 0.2)
    assert choice[:2] == (1e-5, 1)  # of equal scores, the smaller rate, then the smaller mu


# --- The final runs ---------------------------------------------------------------------------------------------------

PAIR = plan.Protocol(methods=("d1", "just-grpo", "wd1"), setups=(SUDOKU, SETUPS["sudoku-base"]))


def chosen(**accuracies):
    names = {"d1": "d1", "just": "just-grpo", "wd1": "wd1"}
    return {(setup, names[n]): Choice(1e-4, 1, value) for setup in PAIR.setups for n, value in accuracies.items()}


def test_final_runs_go_seed_by_seed_and_those_far_behind_have_three_at_the_smaller_budget():
    runs = list(PAIR.final(chosen(d1=0.7, just=0.625, wd1=0.61)))
    assert len(runs) == len(set(runs))
    small, large = ([(seed, budget) for seed in range(8)] for budget in (1_500_000, 5_000_000))
    order = small[:3] + large + small[3:]
    assert [*dict.fromkeys((run.seed, run.budget) for run in runs if run.method != START)] == order
    for setup in PAIR.setups:
        here = [run for run in runs if run.setup == setup]
        for budget, few in ((1_500_000, [0, 1, 2]), (5_000_000, [])):
            seeds = {m: [r.seed for r in here if (r.method, r.budget) == (m, budget)] for m in PAIR.methods}
            assert seeds == {"d1": [*range(8)], "just-grpo": [*range(8)], "wd1": few}
        starts = [run.seed for run in here if run.method == START]
        assert starts == ([*range(8)] if setup.start == "sft" else [0])


@pytest.mark.parametrize(
    ("candidates", "accuracies", "every_seed"),
    [
        ({}, {"d1": 0.6, "just": 0.71, "wd1": 0.69}, {"just-grpo", "d1"}),  # the best one, and d1
        ({"wd1": "wd1"}, {"d1": 0.7, "just": 0.71, "wd1": 0.99}, {"just-grpo", "wd1", "d1"}),  # takes no other's place
        ({}, {"d1": 0.7, "wd1": 0.3}, set()),  # wait for the search of every method
    ],
)
def test_who_has_every_seed(candidates, accuracies, every_seed, monkeypatch):
    monkeypatch.setattr(plan, "CANDIDATES", candidates)
    runs = [run for run in replace(PAIR, most=1).final(chosen(**accuracies)) if run.method != START]
    assert {run.method for run in runs if run.seed > 2} == every_seed
    assert {run.method for run in runs if run.budget > 2e6} == every_seed


def test_an_empty_board_begins_with_every_search_and_quick_is_a_board_that_ends():
    runs = [run for run in FULL.missing({}) if run.method != START]
    cells = sum(3 * len(plan.updates_of(plan.CANDIDATES.get(method, method))) for method in METHODS)
    assert len(runs) == len(set(runs)) == 4 * cells
    assert {(run.stage, run.seed) for run in runs} == {("tuning", 100)}
    results = {}
    for _ in range(3):
        results |= {run: {"validation": {"exact": "01"}} for run in plan.QUICK.missing(results)}
    assert not plan.QUICK.missing(results)
    assert sorted(run.stage for run in results) == 3 * ["final"] + 4 * ["tuning"]


def test_results_are_read_without_sealed_outcomes_and_of_methods_as_they_are_now(tmp_path):
    first, second, other = (Run("final", *SUDOKU, "d1", seed, 1e-4, 4, 1000) for seed in (0, 1, 2))
    lines = [asdict(run) | {"values": plan.written_values(run.method)} for run in (first, second, other)]
    file = plan.file_of(tmp_path, first)
    for kl in (1.0, 2.0):
        append_line(file, lines[0] | {"sealed": {"exact": "01"}, "kl": kl})
    append_line(file, lines[1] | {"values": {"beta": 7}})  # of an older version of the method
    with file.open("a") as opened:
        opened.write('{"stage": "final", "ta')  # killed here
    append_line(file, lines[2])
    found = plan.read_results(tmp_path)
    assert found.keys() == {first, other}
    assert found[first]["kl"] == 2.0
    assert "sealed" not in found[first]


@pytest.mark.parametrize("part", plan.PARTS)
def test_nothing_is_missing_of_what_is_done(part):
    results = plan.read_results()
    assert not plan.PARTS[part](results).missing(results)


def test_the_large_model_is_the_small_ones_recipe_with_ten_times_the_parameters():
    recipe, tokenizer = RECIPES["sudoku"], build_tokenizer("sudoku")
    large = widened(recipe, plan.WIDTH)
    assert replace(large, hidden_size=64, peak_lr=recipe.peak_lr) == recipe
    assert large.peak_lr == pytest.approx([rate * 64 / plan.WIDTH for rate in recipe.peak_lr])
    small, wide = (build_model(tokenizer, 0, size.hidden_size).num_parameters() for size in (recipe, large))
    assert 9 < wide / small < 12
