"""The one-file loop of diffu-GRPO makes the same updates as the trainer."""

from dataclasses import replace

import torch
from datasets import Dataset

from d1.models import load_model, load_tokenizer
from d1.models.tokenizer import end_ids
from d1.rl import DiffuGRPOConfig, DiffuGRPOTrainer
from d1.tasks import load_task
from examples.rl_loop import Settings, train
from tests.commands import ROOT

BASE = str(ROOT / "pocket" / "base")
S = replace(Settings(), prompts=2, num_generations=4, num_iterations=2)


def trained(rows, folder, steps):
    """The trainer's model after `steps` optimizer steps."""
    model = load_model(BASE)
    model.generation_config.eos_token_id = end_ids(load_tokenizer(BASE))
    args = DiffuGRPOConfig(
        output_dir=str(folder),
        per_device_train_batch_size=S.prompts * S.num_generations,
        num_generations=S.num_generations,
        num_iterations=S.num_iterations,
        max_completion_length=S.gen_length,
        block_length=S.block_length,
        diffusion_steps=S.diffusion_steps,
        learning_rate=S.learning_rate,
        lr_scheduler_type="constant",
        adam_beta2=0.99,
        weight_decay=0.0,
        max_grad_norm=S.max_grad_norm,
        max_steps=steps,
        shuffle_dataset=False,
        gradient_checkpointing=False,
        save_strategy="no",
        report_to="none",
        disable_tqdm=True,
        seed=S.seed,
    )
    task = load_task("sudoku")
    trainer = DiffuGRPOTrainer(
        model=model,
        reward_funcs=task.REWARDS,
        args=args,
        train_dataset=Dataset.from_list(rows),
        processing_class=load_tokenizer(BASE),
    )
    trainer.train()
    return model


def test_two_rollouts_end_at_the_trainers_weights(tmp_path):
    task = load_task("sudoku")
    rows = task.load_rows("train").select(range(4)).to_list()
    model, start = load_model(BASE), load_model(BASE)
    batches = [rows[:2], rows[2:]]
    metrics = list(train(model, start.eval(), load_tokenizer(BASE), task.REWARDS, batches, S))
    assert [one["rollout"] for one in metrics] == [0, 1]
    expected = trained(rows, tmp_path, steps=4)
    weights, theirs = dict(model.named_parameters()), dict(expected.named_parameters())
    torch.testing.assert_close(weights, theirs, rtol=0, atol=1e-6)
    moved = [(weights[name] - before).abs().max() for name, before in start.named_parameters()]
    assert max(moved) > 1e-4  # otherwise equal weights would show nothing
