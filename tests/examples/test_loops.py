"""The one-file loops of diffu-GRPO and masked SFT make the same updates as the trainers."""

import json
from dataclasses import replace

import pytest
import torch
from datasets import Dataset
from transformers import TrainingArguments

from d1.models import load_model, load_tokenizer
from d1.models.tokenizer import end_ids
from d1.rl import DiffuGRPOConfig, DiffuGRPOTrainer
from d1.sft import dLLMDataCollator, dLLMSFTDataset, dLLMTrainer, preprocess_dataset
from d1.tasks import load_task
from examples import rl_loop, sft_loop
from tests.commands import ROOT

BASE = str(ROOT / "pocket" / "base")
S = replace(rl_loop.Settings(), prompts=2, num_generations=4, num_iterations=2)


def assert_same_updates(model, expected, start):
    weights, theirs = dict(model.named_parameters()), dict(expected.named_parameters())
    torch.testing.assert_close(weights, theirs, rtol=0, atol=1e-6)
    moved = [(weights[name] - before).abs().max() for name, before in start.named_parameters()]
    assert max(moved) > 1e-4  # otherwise equal weights would show nothing


def trained(task, rows, folder):
    """The trainer's model after two rollouts with their updates."""
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
        max_steps=2 * S.num_iterations,
        shuffle_dataset=False,
        gradient_checkpointing=False,
        save_strategy="no",
        report_to="none",
        disable_tqdm=True,
        seed=S.seed,
    )
    DiffuGRPOTrainer(model, task.REWARDS, args, Dataset.from_list(rows), load_tokenizer(BASE)).train()
    return model


def test_two_rollouts_end_at_the_trainers_weights(tmp_path):
    task = load_task("sudoku")
    rows = task.load_rows("train").select(range(4)).to_list()
    model, start = load_model(BASE), load_model(BASE)
    metrics = list(rl_loop.train(model, start.eval(), load_tokenizer(BASE), task.REWARDS, [rows[:2], rows[2:]], S))
    assert [one["rollout"] for one in metrics] == [0, 1]
    assert_same_updates(model, trained(task, rows, tmp_path), start)


# Adam divides the rounding of a gradient that is almost 0 by itself; a larger epsilon does not.
SFT = replace(sft_loop.Settings(), batch_size=8, adam_epsilon=1e-5)


def test_two_steps_of_sft_end_at_the_trainers_weights(tmp_path):
    tokenizer = load_tokenizer(BASE)
    with open(ROOT / "dataset" / "sudoku_sft.jsonl", encoding="utf-8") as file:
        data = [json.loads(next(file)) for _ in range(16)]
    prepared, _ = preprocess_dataset(Dataset.from_list(data), tokenizer, max_length=128, test_split=0, num_proc=1)
    dataset = dLLMSFTDataset(prepared, tokenizer, 128, eos_padding=SFT.eos_padding, seed=SFT.seed)
    expected, start, model = (load_model(BASE) for _ in range(3))
    trainer = dLLMTrainer(
        model=expected,
        args=TrainingArguments(
            str(tmp_path),
            per_device_train_batch_size=SFT.batch_size,
            max_steps=2,
            learning_rate=SFT.learning_rate,
            adam_epsilon=SFT.adam_epsilon,
            lr_scheduler_type="constant",
            max_grad_norm=SFT.max_grad_norm,
            remove_unused_columns=False,
            dataloader_pin_memory=False,
            report_to="none",
            save_strategy="no",
            disable_tqdm=True,
            seed=SFT.seed,
        ),
        train_dataset=dataset,
        data_collator=dLLMDataCollator(tokenizer),
        processing_class=tokenizer,
    )
    batches = list(trainer.train_sampler(dataset))
    rows = [[one.row for one in batches[step * SFT.batch_size :][: SFT.batch_size]] for step in range(2)]
    trainer.train()

    # Preparing shuffles the rows; noise is keyed by a row's place afterwards.
    encoded = (sft_loop.encode(tokenizer, row, SFT.eos_padding) for row in data)
    by_ids = {tuple(ids.tolist()): (ids, answer) for ids, answer in encoded}
    mine = [[(number, *by_ids[tuple(dataset[number]["input_ids"])]) for number in step] for step in rows]
    losses = list(sft_loop.train(model, tokenizer, mine, SFT))
    assert all(0 < loss < 20 for loss in losses)
    assert_same_updates(model, expected, start)


def test_sft_refuses_a_model_with_blocks():
    args = sft_loop.make_parser().parse_args(["--model_path", str(ROOT / "pocket" / "block_base")])
    with pytest.raises(SystemExit, match="block_base is a model with blocks, whose loss this loop does not have"):
        sft_loop.main(args)
