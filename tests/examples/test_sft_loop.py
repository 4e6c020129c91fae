"""The one-file loop of masked SFT makes the same updates as the trainer."""

import json
from dataclasses import replace

import torch
from datasets import Dataset
from transformers import TrainingArguments

from d1.models import load_model, load_tokenizer
from d1.sft import dLLMDataCollator, dLLMSFTDataset, dLLMTrainer, preprocess_dataset
from examples.sft_loop import Settings, encode, train
from tests.commands import ROOT

BASE = str(ROOT / "pocket" / "base")
# Adam divides the rounding of a gradient that is almost 0 by itself; a larger epsilon does not.
S = replace(Settings(), batch_size=8, adam_epsilon=1e-5)


def test_two_steps_end_at_the_trainers_weights(tmp_path):
    tokenizer = load_tokenizer(BASE)
    with open(ROOT / "dataset" / "sudoku_sft.jsonl", encoding="utf-8") as file:
        data = [json.loads(next(file)) for _ in range(16)]
    prepared, _ = preprocess_dataset(Dataset.from_list(data), tokenizer, max_length=128, test_split=0, num_proc=1)
    dataset = dLLMSFTDataset(prepared, tokenizer, 128, eos_padding=S.eos_padding, seed=S.seed)
    expected, start, model = (load_model(BASE) for _ in range(3))
    trainer = dLLMTrainer(
        model=expected,
        args=TrainingArguments(
            str(tmp_path),
            per_device_train_batch_size=S.batch_size,
            max_steps=2,
            learning_rate=S.learning_rate,
            adam_epsilon=S.adam_epsilon,
            lr_scheduler_type="constant",
            max_grad_norm=S.max_grad_norm,
            remove_unused_columns=False,
            dataloader_pin_memory=False,
            report_to="none",
            save_strategy="no",
            disable_tqdm=True,
            seed=S.seed,
        ),
        train_dataset=dataset,
        data_collator=dLLMDataCollator(tokenizer),
        processing_class=tokenizer,
    )
    batches = list(trainer.train_sampler(dataset))
    slots = [[slot.row for slot in batches[step * S.batch_size :][: S.batch_size]] for step in range(2)]
    trainer.train()

    # Preparing shuffles the rows; noise is keyed by a row's place afterwards.
    encoded = [encode(tokenizer, row, S.eos_padding) for row in data]
    by_ids = {tuple(ids.tolist()): (ids, answer) for ids, answer in encoded}
    mine = [[(number, *by_ids[tuple(dataset[number]["input_ids"])]) for number in step] for step in slots]
    losses = list(train(model, tokenizer, mine, S))
    assert all(0 < loss < 20 for loss in losses)
    weights, theirs = dict(model.named_parameters()), dict(expected.named_parameters())
    torch.testing.assert_close(weights, theirs, rtol=0, atol=1e-6)
    moved = [(weights[name] - before).abs().max() for name, before in start.named_parameters()]
    assert max(moved) > 1e-4  # otherwise equal weights would show nothing
