"""SFT's optimizer steps: the real trainer, the same with the published pieces, and the passes it cannot do without."""

from __future__ import annotations

import functools
import json
import random
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from datasets import Dataset
from torch import Tensor
from transformers import PrinterCallback, TrainingArguments

from benchmarks.clock import Clock
from benchmarks.clocked_training import ClockedTraining
from benchmarks.random_models import ROOT, random_model
from benchmarks.words import random_words, word_tokenizer
from d1.masking import noise_level
from d1.models import load_model, load_tokenizer
from d1.models.attention import padding_mask
from d1.models.head import body_and_head
from d1.models.kinds import block_size
from d1.models.two_streams import two_stream_states
from d1.sft.batches import by_row
from d1.sft.data import preprocess_dataset
from d1.sft.trainer import IGNORED, dLLMDataCollator, dLLMSFTDataset, dLLMTrainer, places_of, states_of


class PublishedSFT(dLLMTrainer):
    """The trainer with the logits of every position; its rows are filled to `max_length`, and of a block-causal model
    whole in both streams (BD3-LM, arXiv 2503.09573, section 3.2)."""

    def row_losses(self, model: Any, inputs: dict[str, Tensor]) -> Tensor:
        noised, labels, visible = inputs["input_ids"], inputs["labels"], inputs["attention_mask"]
        hidden = labels.masked_fill(noised == labels, IGNORED)
        if block_size(model.config):
            clean = torch.where(labels == IGNORED, noised, labels)
            logits = body_and_head(model)[1](two_stream_states(model, clean, noised, visible))
        else:
            logits = model(input_ids=noised, attention_mask=visible).logits
        losses = F.cross_entropy(logits.flatten(0, 1), hidden.flatten(), reduction="none", ignore_index=IGNORED)
        weights = 1 / noise_level(inputs["t"]).view(len(labels), -1)
        return (losses.view(labels.shape) * weights).sum(1)


def pocket_job(blocks: bool) -> tuple[Any, Any, list[dict[str, Any]]]:
    """The pocket model, its tokenizer and rows of its data."""
    path = str(ROOT / "pocket" / ("block_base" if blocks else "base"))
    lines = (ROOT / "dataset" / "sudoku_sft.jsonl").read_text().splitlines()[:256]
    return load_model(path), load_tokenizer(path), [json.loads(line) for line in lines]


def random_job(args: Any, blocks: bool, unlike: bool) -> tuple[Any, Any, list[dict[str, Any]]]:
    """A random model, its tokenizer, and rows with a prompt of `args.prompt` tokens and an answer of a quarter to all
    of `args.length`; `unlike` ones for `args.mu` steps, log-normal around 0.4 of it, as reasoning traces are."""
    model, source = random_model(args.size, block_size=args.block if blocks else None), random.Random(0)
    vocabulary, most = model.config.vocab_size, args.length - 1

    def words() -> int:
        if not unlike:
            return source.randint(args.length // 4, most)
        return min(max(int(0.4 * args.length * source.lognormvariate(0, 0.7)), 1), most)

    rows = [
        {
            "prompt": random_words(args.prompt - 1, vocabulary, source),
            "completion": random_words(words(), vocabulary, source),
        }
        for _ in range(args.rows * args.mu if unlike else 128)
    ]
    return model, word_tokenizer(vocabulary), rows


def sft_trainer(
    kind: type[dLLMTrainer],
    args: Any,
    folder: Path,
    clock: Clock,
    blocks: bool = False,
    unlike: bool = False,
    packed: bool = False,
    grouped: bool = False,
    **changes: Any,
) -> Any:
    """A trainer whose every `train()` is `args.mu` optimizer steps of `args.rows` rows, watched by `clock`; `blocks`
    is for a block-causal model. Rows of `unlike` length are padded, not filled with EOS, or `packed` or `grouped`.
    `changes` are arguments of `TrainingArguments` in place of those of the benchmark."""
    job = functools.partial(random_job, args, blocks, unlike)
    model, tokenizer, data = pocket_job(blocks) if args.size == "pocket" else job()
    max_length = args.prompt + args.length
    rows, _ = preprocess_dataset(Dataset.from_list(data), tokenizer, max_length, 0.0, num_proc=1)
    padding: str | int = "max" if kind is PublishedSFT else 1 if unlike else "batch"
    settings: dict[str, Any] = {
        "per_device_train_batch_size": args.rows,
        "max_steps": args.mu,
        "learning_rate": 1e-6,
        "weight_decay": 0.1,
        "use_cpu": not torch.cuda.is_available(),
        "bf16": torch.cuda.is_available(),
        "logging_steps": args.mu,
        "save_strategy": "no",
        "report_to": "none",
        "remove_unused_columns": False,
        "disable_tqdm": True,
        **changes,
    }
    config = TrainingArguments(output_dir=str(folder), **settings)
    trainer: Any = kind(
        model=model,
        args=config,
        data_collator=dLLMDataCollator(tokenizer, block_size=block_size(model.config), packed=packed),
        train_dataset=dLLMSFTDataset(rows, tokenizer, max_length, eos_padding=padding),
        processing_class=tokenizer,
        callbacks=[ClockedTraining(clock)],
        group_by_length=grouped,
    )
    trainer.remove_callback(PrinterCallback)
    clock.watch(trainer, "get_batch_samples", "batches")
    clock.watch(trainer, "training_step", "update")
    clock.watch(trainer.accelerator, "clip_grad_norm_", "optimizer")
    compute_loss = trainer.compute_loss

    def kept(model: Any, inputs: dict[str, Tensor], *values: Any, **options: Any) -> Any:
        trainer.seen.append(inputs)
        return compute_loss(model, inputs, *values, **options)

    trainer.seen, trainer.compute_loss = [], kept
    return trainer


def bare_sft(trainer: Any, clock: Clock) -> None:
    """Body, head at the hidden positions, and the backward pass from a given gradient of the logits, for the rows of
    the trainer's last steps."""
    head = body_and_head(trainer.model)[1]
    with clock.phase("update"):
        for inputs in trainer.seen[-trainer.args.max_steps :]:
            hidden = (inputs["input_ids"] != inputs["labels"]) & (inputs["labels"] != IGNORED)
            visible = {"attention_mask": padding_mask(inputs["attention_mask"])}
            with trainer.accelerator.autocast():
                logits = head(states_of(trainer.model, inputs | visible, hidden, places_of(hidden, hidden.device)))
            logits.backward(torch.ones_like(logits))
            trainer.model.zero_grad()


def bare_rows(trainer: Any, clock: Clock) -> None:
    """`bare_sft` of packed rows, each in a pass of its own."""
    body, head = body_and_head(trainer.model)
    with clock.phase("update"):
        for inputs in trainer.seen[-trainer.args.max_steps :]:
            for noised, labels in zip(by_row(inputs, "input_ids"), by_row(inputs, "labels"), strict=True):
                hidden = (noised != labels) & (labels != IGNORED)
                with trainer.accelerator.autocast():
                    logits = head(body(noised[None])[0][hidden])
                logits.backward(torch.ones_like(logits))
            trainer.model.zero_grad()
