"""A run that ends at a budget: what counts, where it stops, what it leaves, also when it was killed on the way."""

import json
from types import SimpleNamespace

import torch
from safetensors.torch import load_file
from transformers import TrainerCallback

from d1.rl.budget import QUARTER, StopAtCompute, is_spent, total_compute
from tests.tiny_grpo import clockless, logged, make_method, make_trainer, method_settings

LONG = {"max_steps": 100, "save_strategy": "steps", "save_steps": 3, "lr_scheduler_type": "constant"}


def budgeted(model_dir, folder, budget, **changes):
    trainer = make_trainer(model_dir, folder, **(LONG | changes))
    trainer.add_callback(StopAtCompute(trainer, budget))
    return trainer


def test_compute_is_rollouts_once_scores_once_updates_thrice_and_a_fourth_time_what_is_computed_again(
    tiny_model_dir, tmp_path
):
    """Of two updates on a rollout of four rows, in passes: d1 has another prompt mask for each update, and a reference;
    JustGRPO has none, and the eight tokens of a text in the same eight views for both."""
    prompts = []
    for method, passes in (("d1", 4 + 2 + 2 + 2 * 3), ("just-grpo", 8 + 8 + 2 * 8 * 4)):
        settings = method_settings(method) | {"max_steps": 2, "eval_strategy": "steps", "eval_steps": 1}
        trainer = make_method(tiny_model_dir, tmp_path / method, method, ends=(), base=settings)
        original = trainer.sample

        def sample(ids, mask, trainer=trainer, original=original):
            if trainer.model.training:
                prompts.append(mask.sum(-1) + 8)  # a row's tokens: its prompt and the whole canvas
            return original(ids, mask)

        trainer.sample = sample
        trainer.train()
        tokens = int(prompts.pop().sum())
        assert trainer.state.log_history[-1]["compute_tokens"] == tokens * passes
        assert not prompts


def test_a_run_stops_at_the_first_step_that_reaches_its_budget_and_saves_a_quarter(tiny_model_dir, tmp_path):
    free = make_trainer(tiny_model_dir, tmp_path / "free", **(LONG | {"max_steps": 9}))
    kept = {}

    class Keep(TrainerCallback):
        def on_step_end(self, args, state, control, **kwargs):
            kept[state.global_step] = {name: value.clone() for name, value in free.model.state_dict().items()}

    free.add_callback(Keep())
    free.train()
    spent = {entry["step"]: entry["compute_tokens"] for entry in logged(free)}
    budget = spent[7] - 1
    quarter = min(step for step, tokens in spent.items() if tokens >= budget / 4)
    assert 1 < quarter < 7
    run = budgeted(tiny_model_dir, tmp_path / "run", budget)
    run.train()
    assert run.state.global_step == 7
    for folder, step in ((QUARTER, quarter), ("checkpoint-7", 7)):
        saved = load_file(tmp_path / "run" / folder / "model.safetensors")
        assert all(torch.equal(value, kept[step][name]) for name, value in saved.items())
    checkpoint = str(tmp_path / "run" / "checkpoint-7")
    assert total_compute(run) == spent[7]
    assert is_spent(checkpoint, budget)
    assert is_spent(checkpoint, spent[7])
    assert not is_spent(checkpoint, spent[7] + 1)
    assert not is_spent(checkpoint, None)
    assert not is_spent(None, budget)

    (tmp_path / "run" / QUARTER).rename(tmp_path / "whole_quarter")
    early = budgeted(tiny_model_dir, tmp_path / "run", budget)  # killed between two checkpoints: on either side of it
    early.train(resume_from_checkpoint=str(tmp_path / "run" / "checkpoint-6"))
    assert early.state.global_step == 7
    assert clockless(early.state.log_history) == clockless(run.state.log_history)
    assert (tmp_path / "run" / QUARTER).exists() == (quarter > 6)


def test_processes_spend_one_budget_together(tmp_path):
    for rank, tokens in enumerate((70, 30)):
        (tmp_path / f"rollout_rank{rank}.json").write_text(json.dumps({"compute": tokens, "step": 7}))
    assert is_spent(str(tmp_path), 100)
    assert not is_spent(str(tmp_path), 101)
    gathered = SimpleNamespace(device="cpu", gather=lambda own: torch.stack([own, torch.tensor(30)]))
    assert total_compute(SimpleNamespace(compute=70, accelerator=gathered)) == 100


def test_progress_is_to_the_step_that_spends_the_budget():
    """Three steps took 25 tokens of 100: all take twelve, or as many as max_steps allows."""
    stop = StopAtCompute(None, 100)
    state = SimpleNamespace(global_step=0, max_steps=1000)
    assert stop.last_step(state) == 1000
    state.global_step, stop.spent = 3, 25
    assert stop.last_step(state) == 12
    stop.spent = 23  # 13.04 steps: the fourteenth spends what is left
    assert stop.last_step(state) == 14
    state.max_steps = 10
    assert stop.last_step(state) == 10
    stop.spent, state.global_step = 101, 13
    state.max_steps = 1000
    assert stop.last_step(state) == 13
