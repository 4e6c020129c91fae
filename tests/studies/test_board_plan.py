"""The leaderboard's protocol as code: what a run is, the search, what is done."""

import itertools
from dataclasses import asdict, replace
from pathlib import Path

import pytest

from d1.rl.methods import METHODS
from d1.rl.train import make_parser
from pocket.make_base import build_model, widened
from pocket.recipes import RECIPES
from pocket.tokenizer import build_tokenizer
from studies.json_lines import append_line
from studies.leaderboard import plan
from studies.leaderboard.plan import SETUPS, TASKS, Run
from studies.leaderboard.variants import BOARD, changed_since, flags_of

ROOT = Path(__file__).parents[2]
SUDOKU = SETUPS["sudoku-sft"]


@pytest.mark.parametrize(("method", "task"), zip(BOARD, itertools.cycle(TASKS), strict=False))
def test_each_run_is_its_entry_of_the_board_at_the_budget_rate_and_mu_that_it_names(method, task, tmp_path):
    recipe, length, values = RECIPES[task], TASKS[task].length, BOARD[method]["values"]
    run = Run("final", task, "sft", method, 1, 3e-5, 2, 5000)
    flags = ["--config", str(ROOT / "diffu-grpo" / "pocket.yaml"), *run.settings(), "--output_dir", str(tmp_path)]
    config, _ = make_parser().parse_args_and_config([*flags, "--model_path", str(TASKS[task].base)])
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


def test_the_board_keeps_its_entries_when_methods_change(monkeypatch):
    before = BOARD["gdpo"]["values"]
    for values, flags in ((before, []), (before | {"beta": 7.0}, ["--beta", str(before["beta"])])):
        monkeypatch.setitem(METHODS, "gdpo", replace(METHODS["gdpo"], values=values))
        assert ("gdpo" in changed_since()) == bool(flags)
        assert plan.written_values("gdpo") == before
        assert flags_of("gdpo") == ["--method", "gdpo", *flags]
    monkeypatch.delitem(METHODS, "gdpo")
    assert "gdpo" in changed_since()


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
