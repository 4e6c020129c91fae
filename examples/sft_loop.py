"""Masked SFT (LLaDA, arXiv 2502.09992, algorithm 2) in one file: no trainer, one device, all weights trained.

    python -m examples.sft_loop --model_path pocket/base --train_data dataset/sudoku_sft.jsonl

It reads from top to bottom: a conversation becomes token ids and the position where its answer starts; each row draws a
time t and hides each answer token with probability t'; the loss is the cross-entropy of the hidden tokens over t',
divided by the answer tokens of all rows, as in d1. `d1.sft` adds processes, LoRA, accumulation, packing, evaluation,
checkpoints and the losses of models with blocks; without these, its updates are the ones below
(`tests/examples/test_loops.py`).
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from d1.masking import draw_noise, keyed_generator, noise_level
from d1.models import load_model, load_tokenizer
from d1.models.kinds import block_size
from d1.models.tokenizer import trained_ids, whole_turns
from d1.sft.data import convert_columns, join_turns

TRAIN_NOISE = 0  # the stream of random numbers, numbered as in `d1.sft.data`


@dataclass(frozen=True)
class Settings:
    """`d1.sft.train --help` explains each field."""

    batch_size: int = 32
    eos_padding: int = 40  # minimum number of answer tokens, filled with EOS: the model learns to stop
    learning_rate: float = 2e-4
    adam_epsilon: float = 1e-8
    max_grad_norm: float = 1.0
    seed: int = 42


def encode(tokenizer: Any, row: dict[str, Any], eos_padding: int) -> tuple[Tensor, Tensor]:
    """Token ids (tokens,) of a row, and whether each token is part of the answer.

    `convert_columns` reads s1K's columns, `messages`, or `prompt` and `completion`, among others.
    """
    messages, options = join_turns(convert_columns(row))
    ids, start = trained_ids(whole_turns(messages), tokenizer, "the answer", options)
    ids += [tokenizer.eos_token_id] * (eos_padding - (len(ids) - start))
    return torch.tensor(ids), torch.arange(len(ids)) >= start


def collate(rows: Sequence[tuple[int, Tensor, Tensor]], epoch: int, tokenizer: Any, seed: int) -> dict[str, Tensor]:
    """A batch of rows (number, ids, answer): `clean`, `noised`, `hidden` and `visible` (rows, tokens), and `t` (rows,).

    The noise of a row is a function of the seed, the epoch and the row's number alone.
    """
    shape = (len(rows), max(len(ids) for _, ids, _ in rows))
    clean = torch.full(shape, tokenizer.pad_token_id)
    answer, hidden, visible = (torch.zeros(shape, dtype=torch.bool) for _ in range(3))
    t = torch.zeros(len(rows))
    for row, (number, ids, is_answer) in enumerate(rows):
        clean[row, : len(ids)], answer[row, : len(ids)], visible[row, : len(ids)] = ids, is_answer, True
        t[row], hidden[row] = draw_noise(answer[row], keyed_generator(seed, TRAIN_NOISE, epoch, number))
    noised = clean.masked_fill(hidden, tokenizer.mask_token_id)
    return {"clean": clean, "noised": noised, "answer": answer, "hidden": hidden, "visible": visible.long(), "t": t}


def masked_loss(model: Any, batch: dict[str, Tensor]) -> Tensor:
    """Sum over hidden tokens of cross-entropy / t', divided by the number of answer tokens in the batch."""
    logits = model(input_ids=batch["noised"], attention_mask=batch["visible"]).logits.float()
    losses = torch.nn.functional.cross_entropy(logits.transpose(1, 2), batch["clean"], reduction="none")
    # The expected number of hidden tokens is proportional to t': divide by it, so that every t has the same weight.
    weights = batch["hidden"] / noise_level(batch["t"]).unsqueeze(1)
    return (losses * weights).sum() / batch["answer"].sum()


def train(
    model: Any, tokenizer: Any, batches: Sequence[list[tuple[int, Tensor, Tensor]]], s: Settings
) -> Iterator[float]:
    """Takes one optimizer step per batch of encoded rows; yields the losses."""
    optimizer = torch.optim.AdamW(model.parameters(), s.learning_rate, eps=s.adam_epsilon, weight_decay=0.0)
    model.train()
    for rows in batches:
        loss = masked_loss(model, collate(rows, 0, tokenizer, s.seed))
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), s.max_grad_norm)
        optimizer.step()
        yield loss.item()


def make_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model_path", default="pocket/base", help="folder or hub name")
    parser.add_argument(
        "--train_data", default="dataset/sudoku_sft.jsonl", help="JSON lines with prompt and completion"
    )
    parser.add_argument("--steps", type=int, default=20)
    return parser


def main(args: argparse.Namespace) -> None:
    s, tokenizer, model = Settings(), load_tokenizer(args.model_path), load_model(args.model_path)
    if block_size(model.config) is not None:
        raise SystemExit(f"{args.model_path} is a model with blocks, whose loss this loop does not have: use d1 sft")
    with open(args.train_data, encoding="utf-8") as file:
        rows = [json.loads(line) for line in file]
    if args.steps * s.batch_size > len(rows):
        raise SystemExit(f"--steps {args.steps}: {len(rows)} rows are {len(rows) // s.batch_size} steps of one epoch")
    order = torch.randperm(len(rows), generator=keyed_generator(s.seed)).tolist()[: args.steps * s.batch_size]
    encoded = [(number, *encode(tokenizer, rows[number], s.eos_padding)) for number in order]
    batches = [encoded[start : start + s.batch_size] for start in range(0, len(encoded), s.batch_size)]
    for step, loss in enumerate(train(model, tokenizer, batches, s)):
        sys.stdout.write(f"step {step}  loss {loss:.4f}\n")


if __name__ == "__main__":
    main(make_parser().parse_args())
