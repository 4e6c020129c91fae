"""Generates the completions of one process's share of an evaluation, batch by batch, into its journal.

In 16 bits a row's tokens depend, now and then, on the rows beside it. So a run's batches are the same whatever is left
to do and however many processes share them: they are made of all its rows, dealt out whole, and one of which a kill
left a part is generated again, whole.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Iterable
from typing import Any

import torch
from eval_journal import Journal, Key
from eval_prompts import Prompt
from tqdm import tqdm

from d1.masking import keyed_generator
from d1.models.load import load_on_device
from d1.models.tokenizer import end_ids
from d1.sampling import rollout
from d1.sampling.flags import sampling_settings
from d1.sampling.settings import check_room

Request = tuple[Prompt, int]  # what one completion answers: a prompt, and which of its samples it is


def key_of(row: Request) -> Key:
    return row[0].index, row[1]


def all_batches(prompts: Iterable[Prompt], num_samples: int, batch_size: int) -> list[list[Request]]:
    """The batches of a run, a function of these arguments alone.

    The longest prompts come first: batches need little padding, and one that does not fit fails at once.
    """
    rows = [(prompt, sample) for prompt in prompts for sample in range(num_samples)]
    rows.sort(key=lambda row: -len(row[0].ids))
    return [rows[start : start + batch_size] for start in range(0, len(rows), batch_size)]


def generate_missing(
    args: argparse.Namespace,
    tokenizer: Any,
    batches: list[list[Request]],
    done: dict[Key, dict[str, Any]],
    journal: Journal,
    world: int,
) -> None:
    """Generates this process's share of the batches that are not all in `done`, and journals what is new in them."""
    unfinished = [batch for batch in batches if any(key_of(row) not in done for row in batch)]
    mine = unfinished[journal.rank :: world]
    if not mine:
        return
    model = load_model_for(args)
    check_room(model.config, max(len(prompt.ids) for batch in mine for prompt, _ in batch), args.gen_length)
    ends = torch.tensor(end_ids(tokenizer), device=model.device)
    generated, passes, rows, started = 0, 0, 0, time.perf_counter()
    new = sum(key_of(row) not in done for batch in mine for row in batch)
    share = "" if world == 1 else f" (process 0 of {world})"
    with tqdm(total=new, desc=journal.setup + share, unit="problem", disable=journal.rank != 0) as progress:
        for batch in mine:
            entries = generate_batch(args, model, tokenizer, batch, ends)
            for entry in entries:
                if (entry["index"], entry["sample"]) not in done:
                    journal.append(entry)
                    progress.update()
            generated += sum(entry["tokens"] for entry in entries)
            passes += sum(entry["forward_passes"] for entry in entries)
            rows += len(batch)
            rate = generated / (time.perf_counter() - started)
            progress.set_postfix_str(f"{rate:.0f} tokens/s, {passes / rows:.1f} forward passes each", refresh=False)


def load_model_for(args: argparse.Namespace) -> Any:
    """The model on this process's device."""
    return load_on_device(
        args.model_path,
        args.dtype,
        adapter=args.checkpoint_path or None,
        attn_implementation=args.attn_implementation,
        trust_remote_code=args.trust_remote_code,
    )


def generate_batch(
    args: argparse.Namespace,
    model: Any,
    tokenizer: Any,
    batch: list[Request],
    ends: torch.Tensor,
) -> list[dict[str, Any]]:
    """Journal entries of one batch, under the names of the generation files: texts, `tokens` generated before the end,
    `forward_passes`, `forward_tokens` that these fed through the model, and seconds (the batch's, shared)."""
    began = time.perf_counter()
    width = max(len(prompt.ids) for prompt, _ in batch)
    ids = torch.full((len(batch), width), tokenizer.pad_token_id)
    mask = torch.zeros_like(ids)
    for row, (prompt, _) in enumerate(batch):
        ids[row, width - len(prompt.ids) :] = torch.tensor(prompt.ids)
        mask[row, width - len(prompt.ids) :] = 1
    sampled = rollout(
        model,
        ids.to(ends.device),
        mask.to(ends.device),
        sampling_settings(vars(args), model.config),
        mask_token_id=tokenizer.mask_token_id,
        generator=[keyed_generator(args.seed, prompt.index, sample) for prompt, sample in batch],
        eos_token_ids=ends.tolist() if args.eos_stop else None,
    )
    output = sampled.ids[:, width:]
    lengths = (torch.isin(output, ends).cumsum(1) == 0).sum(1).tolist()
    seconds = (time.perf_counter() - began) / len(batch)
    return [
        {
            "index": prompt.index,
            "sample": sample,
            "generations": tokenizer.decode(row),
            "text": tokenizer.decode(row[:length], skip_special_tokens=True),
            "tokens": length,
            "forward_passes": passes,
            "forward_tokens": fed,
            "seconds": seconds,
        }
        for (prompt, sample), row, length, passes, fed in zip(
            batch, output.tolist(), lengths, sampled.passes.tolist(), sampled.forward_tokens.tolist(), strict=True
        )
    ]
