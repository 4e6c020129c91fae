"""A run that ends at a budget: what counts, where it stops, and what it saves, also after a kill."""

import itertools
import json
from types import SimpleNamespace

import pytest
import torch
from safetensors.torch import load_file
from transformers import TrainerCallback

from d1.rl.batch import loss_inputs
from d1.rl.state_rewards import StateRewards
from d1.rl.trainer import DiffuGRPOTrainer, StopAtCompute, budget_exhausted, saved_at
from tests.tiny_grpo import clockless, logged, make_method, make_trainer, method_settings, weights

LONG = {"max_steps": 100, "save_strategy": "steps", "save_steps": 3, "lr_scheduler_type": "constant"}


SHARES = (0.25, 0.5)


def budgeted(model_dir, folder, budget, **changes):
    trainer = make_trainer(model_dir, folder, **(LONG | changes))
    trainer.add_callback(StopAtCompute(trainer, budget, SHARES))
    return trainer


@pytest.mark.parametrize("at_once", [1, 99])
def test_compute_is_one_per_token_of_a_forward_pass_and_two_for_its_backward_pass(tiny_model_dir, tmp_path, at_once):
    """Two updates on a rollout of four rows, in passes. d1 has another prompt mask for each update, and a reference.
    JustGRPO has no reference, and the same eight views of a text's eight tokens for both updates; with one view at
    once, each is computed twice but counted once."""
    prompts = []
    for method, passes in (("d1", 4 + 2 + 2 + 2 * 3), ("just-grpo", 8 + 8 + 2 * 8 * 3)):
        settings = method_settings(method) | {"max_steps": 2, "eval_strategy": "steps", "eval_steps": 1}
        settings |= {"views_at_once": at_once}
        trainer = make_method(tiny_model_dir, tmp_path / method, method, ends=(), base=settings)
        original = trainer.sample

        def sample(ids, mask, trainer=trainer, original=original):
            if trainer.model.training:
                prompts.append(mask.sum(-1) + 8)  # tokens per row: its prompt and the whole canvas
            return original(ids, mask)

        trainer.sample = sample
        trainer.train()
        tokens = int(prompts.pop().sum())
        assert trainer.state.log_history[-1]["compute_tokens"] == tokens * passes
        assert not prompts


@pytest.mark.parametrize("folder", ["tiny_model_dir", "tiny_block_dir"])
def test_a_canvas_that_is_finished_in_one_pass_costs_all_tokens_that_the_model_reads(
    request, tmp_path, folder, monkeypatch
):
    """`--state_reward`: a model with blocks reads a second stream, the blocks of the canvas once more."""
    read = []
    view_advantages = StateRewards.view_advantages

    def watched(source, batch, ranks):
        def note(module, args, kwargs, output):
            ids = kwargs.get("input_ids", args[0] if args else None)
            read.append(ids.numel() if ids is not None else kwargs["inputs_embeds"].shape[:2].numel())

        padding = int(batch["prompt_mask"].eq(0).sum())
        assert not padding
        trainer = source.trainer
        before = int(trainer.computed_tokens)
        with trainer.model.base_model.register_forward_hook(note, with_kwargs=True):
            advantages = view_advantages(source, batch, ranks)
        assert int(trainer.computed_tokens) - before == sum(read) > 0
        return advantages

    monkeypatch.setattr(StateRewards, "view_advantages", watched)
    options = {"max_steps": 1, "num_generations": 4, "per_device_train_batch_size": 4}
    make_method(request.getfixturevalue(folder), tmp_path, "egspo-sa", ends=(), **options).train()
    assert read


@pytest.mark.parametrize("method", ["d1", "espo"])
@pytest.mark.parametrize("dropped", ["some", "all"])
def test_prompts_out_of_the_loss_cost_their_rollout_alone(tiny_model_dir, tmp_path, method, dropped):
    """Two prompts in one micro-batch: `right_share` keeps the second, or none."""
    found, bodies = {}, []
    share = [0.9, 1.0] if dropped == "some" else [0.1, 0.2]

    class Filtered(DiffuGRPOTrainer):
        def after_rollout(self, batch):
            batch["completion_is_right"] = (torch.arange(len(batch["canvas_ids"])) >= 4).double()
            super().after_rollout(batch)
            found["pairs"] = batch["view_weights"].ne(0).any(-1).sum((1, 2))

        def sample(self, ids, mask):
            sampled = super().sample(ids, mask)
            found["sampled"], found["tokens"] = int(sampled.forward_tokens.sum()), mask.sum(-1) + 8
            bodies.clear()
            return sampled

    options = {"max_steps": 2, "per_device_train_batch_size": 8, "right_share": share, "num_iterations": 2}
    options["weight_decay"] = 0.0  # which would change weights without a gradient
    trainer = make_method(tiny_model_dir, tmp_path, method, Filtered, ends=(), views_at_once=9, **options)
    for model in (trainer.model, trainer.ref_model):
        model.model.register_forward_pre_hook(
            lambda _, args, kwargs: bodies.append(len(kwargs["input_ids"])), with_kwargs=True
        )
    trainer.train()
    pairs, each = found["pairs"], 1 + 1 + 3  # old and reference log-probs, an update
    assert not pairs[:4].any()
    assert pairs[4:].all() == (dropped == "some")
    assert logged(trainer)[-1]["compute_tokens"] == found["sampled"] + each * int((pairs * found["tokens"]).sum())
    # If no row scores anything, one row stays in each pass, for a gradient of 0; equal views are scored once.
    assert sum(bodies) == 3 * int(pairs.sum()) if dropped == "some" else 4 <= sum(bodies) <= 6
    both = zip(trainer.model.parameters(), trainer.ref_model.parameters(), strict=True)
    assert any(not torch.equal(weight, start) for weight, start in both) == (dropped == "some")


def test_a_run_stops_at_the_first_step_that_reaches_its_budget_and_saves_shares_of_it(tiny_model_dir, tmp_path):
    free = make_trainer(tiny_model_dir, tmp_path / "free", **(LONG | {"max_steps": 9}))
    kept = {}

    class Keep(TrainerCallback):
        def on_step_end(self, args, state, control, **kwargs):
            kept[state.global_step] = {name: value.clone() for name, value in free.model.state_dict().items()}

    free.add_callback(Keep())
    free.train()
    spent = {entry["step"]: entry["compute_tokens"] for entry in logged(free)}
    budget = spent[7] - 1
    steps = {share: min(step for step, tokens in spent.items() if tokens >= share * budget) for share in SHARES}
    assert 1 < steps[0.25] < steps[0.5] < 7
    folder = tmp_path / "run"
    run = budgeted(tiny_model_dir, folder, budget)
    run.train()
    assert run.state.global_step == 7
    for saved, step in (
        *((saved_at(folder, share), step) for share, step in steps.items()),
        (folder / "checkpoint-7", 7),
    ):
        tensors = load_file(saved / "model.safetensors")
        assert all(torch.equal(value, kept[step][name]) for name, value in tensors.items())
    checkpoint = str(folder / "checkpoint-7")
    assert run.total_computed_tokens() == spent[7]
    assert budget_exhausted(checkpoint, budget)
    assert budget_exhausted(checkpoint, spent[7])
    assert not budget_exhausted(checkpoint, spent[7] + 1)
    assert not budget_exhausted(checkpoint, None)
    assert not budget_exhausted(None, budget)
    finished = tmp_path / "finished"  # the folder of a run whose checkpoints were deleted
    finished.mkdir()
    run.state.save_to_json(str(finished / "trainer_state.json"))
    assert budget_exhausted(str(finished), spent[7])
    assert not budget_exhausted(str(finished), spent[7] + 1)

    for share in SHARES:
        saved_at(folder, share).rename(tmp_path / f"whole_{share}")
    early = budgeted(tiny_model_dir, folder, budget)  # killed between two checkpoints: on either side of them
    early.train(resume_from_checkpoint=str(folder / "checkpoint-6"))
    assert early.state.global_step == 7
    assert clockless(early.state.log_history) == clockless(run.state.log_history)
    assert {share: saved_at(folder, share).exists() for share in SHARES} == {s: step > 6 for s, step in steps.items()}


def test_a_linear_rate_falls_with_the_compute_spent_to_0_at_the_budget_and_resumes_to_the_bit(tiny_model_dir, tmp_path):
    """Steps have unequal costs: the first of three updates on a rollout includes the rollout's cost."""
    options = {"lr_scheduler_type": "linear", "learning_rate": 1e-3, "max_steps": 100, "num_iterations": 3}
    options |= {"optim": "adamw_torch", "max_compute_tokens": 10_000}
    whole = budgeted(tiny_model_dir, tmp_path / "whole", 10_000, **options)
    whole.train()
    entries = logged(whole)
    spent = [0, *(entry["compute_tokens"] for entry in entries)]
    assert len(spent) > 6
    assert len({after - before for before, after in itertools.pairwise(spent)}) > 1
    # A step's own cost counts from the next step on.
    assert [entry["learning_rate"] for entry in entries] == [1e-3 * (1 - tokens / 10_000) for tokens in spent[:-1]]
    assert whole.lr_scheduler.get_last_lr()[0] == 0.0
    assert spent[-2] < 10_000 <= spent[-1]

    resumed = budgeted(tiny_model_dir, tmp_path / "whole", 10_000, **options)
    resumed.train(resume_from_checkpoint=str(tmp_path / "whole" / "checkpoint-3"))
    assert clockless(resumed.state.log_history) == clockless(whole.state.log_history)
    for name, value in weights(whole.model).items():
        assert torch.equal(value, weights(resumed.model)[name]), name


def test_a_schedule_of_the_loss_follows_the_budget_of_a_run_that_it_ends(tiny_model_dir, tmp_path, monkeypatch):
    """As long as more of the budget is spent than of the steps are done, which stay far from their maximum."""
    met = []

    def recorded(*args, progress, **options):
        met.append(progress)
        return loss_inputs(*args, progress=progress, **options)

    monkeypatch.setattr("d1.rl.trainer.loss_inputs", recorded)
    options = {"max_steps": 1000, "max_compute_tokens": 20_000, "lr_scheduler_type": "constant"}
    trainer = make_method(tiny_model_dir, tmp_path, "d-treerpo", **options)
    trainer.add_callback(StopAtCompute(trainer, 20_000))
    trainer.train()
    spent = [entry["compute_tokens"] for entry in logged(trainer)]
    assert len(spent) > 5
    assert met == [0.0, *(tokens / 20_000 for tokens in spent[:-1])]


def test_processes_spend_one_budget_together(tmp_path):
    for rank, tokens in enumerate((70, 30)):
        (tmp_path / f"rollout_rank{rank}.json").write_text(json.dumps({"compute": tokens, "step": 7}))
    assert budget_exhausted(str(tmp_path), 100)
    assert not budget_exhausted(str(tmp_path), 101)
    gathered = SimpleNamespace(device="cpu", gather=lambda own: torch.stack([own, torch.tensor(30)]))
    assert DiffuGRPOTrainer.total_computed_tokens(SimpleNamespace(computed_tokens=70, accelerator=gathered)) == 100


def test_progress_is_to_the_step_that_spends_the_budget():
    """Three steps took 25 of 100 tokens: the run takes twelve steps, or as many as max_steps allows."""
    stop = StopAtCompute(None, 100)
    state = SimpleNamespace(global_step=0, max_steps=1000)
    assert stop.last_step(state) == 1000
    state.global_step, stop.spent = 3, 25
    assert stop.last_step(state) == 12
    stop.spent = 23  # 13.04 steps: the fourteenth spends the rest
    assert stop.last_step(state) == 14
    state.max_steps = 10
    assert stop.last_step(state) == 10
    stop.spent, state.global_step = 101, 13
    state.max_steps = 1000
    assert stop.last_step(state) == 13
