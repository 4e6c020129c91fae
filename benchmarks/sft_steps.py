"""SFT's optimizer steps: the real trainer, the same with the published pieces, and the passes it cannot do without."""

from __future__ import annotations

import json
import random
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from datasets import Dataset
from torch import Tensor
from transformers import PrinterCallback, TrainingArguments

from benchmarks.clock import Clock, ClockedTraining
from benchmarks.random_models import ROOT, model_and_tokenizer, random_words
from d1.masking import noise_level
from d1.models.attention import padding_mask
from d1.models.head import body_and_head
from d1.sft.data import preprocess_dataset
from d1.sft.trainer import IGNORED, dLLMDataCollator, dLLMSFTDataset, dLLMTrainer, places_of, states_of


class PublishedSFT(dLLMTrainer):
    """The trainer with the logits of every position; its rows are filled to `max_length`."""

    def row_losses(self, model: Any, inputs: dict[str, Tensor]) -> Tensor:
        noised, labels = inputs["input_ids"], inputs["labels"]
        hidden = labels.masked_fill(noised == labels, IGNORED)
        logits = model(input_ids=noised, attention_mask=inputs["attention_mask"]).logits
        losses = F.cross_entropy(logits.flatten(0, 1), hidden.flatten(), reduction="none", ignore_index=IGNORED)
        weights = 1 / noise_level(inputs["t"]).view(len(labels), -1)
        return (losses.view(labels.shape) * weights).sum(1)


def rows_of(args: Any, vocabulary: int) -> list[dict[str, Any]]:
    """Rows of the pocket model's data, or of random words: a prompt of `args.prompt` tokens, and an answer of a quarter
    to all of `args.length`."""
    if args.size == "pocket":
        lines = (ROOT / "dataset" / "sudoku_sft.jsonl").read_text().splitlines()[:256]
        return [json.loads(line) for line in lines]
    source = random.Random(0)
    return [
        {
            "prompt": random_words(args.prompt - 1, vocabulary, source),
            "completion": random_words(source.randint(args.length // 4, args.length - 1), vocabulary, source),
        }
        for _ in range(128)
    ]


def sft_trainer(kind: type[dLLMTrainer], args: Any, folder: Path, clock: Clock) -> Any:
    """A trainer whose every `train()` is `args.mu` optimizer steps of `args.rows` rows, watched by `clock`; it keeps
    its batches in `seen`."""
    model, tokenizer = model_and_tokenizer(args.size)
    max_length = args.prompt + args.length
    data = Dataset.from_list(rows_of(args, model.config.vocab_size))
    rows, _ = preprocess_dataset(data, tokenizer, max_length, 0.0, num_proc=1)
    config = TrainingArguments(
        output_dir=str(folder),
        per_device_train_batch_size=args.rows,
        max_steps=args.mu,
        learning_rate=1e-6,
        weight_decay=0.1,
        use_cpu=not torch.cuda.is_available(),
        bf16=torch.cuda.is_available(),
        logging_steps=args.mu,
        save_strategy="no",
        report_to="none",
        remove_unused_columns=False,
        disable_tqdm=True,
    )
    padding = "max" if kind is PublishedSFT else "batch"
    trainer: Any = kind(
        model=model,
        args=config,
        data_collator=dLLMDataCollator(tokenizer),
        train_dataset=dLLMSFTDataset(rows, tokenizer, max_length, eos_padding=padding),
        processing_class=tokenizer,
        callbacks=[ClockedTraining(clock)],
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
