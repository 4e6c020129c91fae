"""Generates the completions of one process's share of an evaluation, batch by batch, into its journal."""

from __future__ import annotations

import argparse
import os
import time
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from eval_journal import Journal
from tqdm import tqdm

from d1.masking import keyed_generator
from d1.models import load_model
from d1.sampling import rollout
from d1.sampling.settings import SamplingSettings


@dataclass(frozen=True)
class Problem:
    """A problem of the split: its place there, the text and ids of its prompt, and the row it comes from."""

    index: int
    prompt: str
    ids: list[int]
    question: str
    ground_truth: Any


def sampling_settings(args: argparse.Namespace) -> SamplingSettings:
    """Those that eval.py's flags choose."""
    return SamplingSettings.of(args, steps="diffusion_steps")


def generate_all(
    args: argparse.Namespace, dtype: torch.dtype, tokenizer: Any, work: list[tuple[Problem, int]], journal: Journal
) -> None:
    """Generates the completions of `work`, pairs of problem and sample, and writes each batch to the journal."""
    local_rank = int(os.environ.get("LOCAL_RANK", "0"))
    device = f"cuda:{local_rank}" if torch.cuda.is_available() else "cpu"
    model = load_model(
        args.model_path,
        dtype,
        device,
        adapter=args.checkpoint_path or None,
        attn_implementation=args.attn_implementation,
        trust_remote_code=args.trust_remote_code,
    )
    longest = max(len(problem.ids) for problem, _ in work)
    room = getattr(model.config, "max_position_embeddings", None)
    if room is not None and longest + args.gen_length > room:
        raise ValueError(f"a prompt of {longest} tokens and gen_length {args.gen_length} exceed the model's {room}")
    ends = torch.tensor(end_ids(tokenizer), device=device)
    tokens, passes, started = 0, 0, time.perf_counter()
    share = "" if not dist.is_initialized() else f" (process 0 of {dist.get_world_size()})"
    with tqdm(total=len(work), desc=journal.setup + share, unit="problem", disable=journal.rank != 0) as progress:
        for start in range(0, len(work), args.batch_size):
            batch = work[start : start + args.batch_size]
            entries = generate_batch(args, model, tokenizer, batch, ends)
            for entry in entries:
                journal.append(entry)
            tokens += sum(entry["tokens"] for entry in entries)
            passes += sum(entry["forward_passes"] for entry in entries)
            rate, mean_passes = tokens / (time.perf_counter() - started), passes / (start + len(batch))
            progress.set_postfix_str(f"{rate:.0f} tokens/s, {mean_passes:.1f} forward passes each", refresh=False)
            progress.update(len(batch))


def end_ids(tokenizer: Any) -> list[int]:
    """Tokens that end a completion: end of text (first, it fills what an EOS stop leaves out), end of turn, padding."""
    turn = tokenizer.convert_tokens_to_ids(getattr(tokenizer, "eot_token", None) or tokenizer.eos_token)
    return list(dict.fromkeys([tokenizer.eos_token_id, turn, tokenizer.pad_token_id]))


def generate_batch(
    args: argparse.Namespace,
    model: Any,
    tokenizer: Any,
    batch: list[tuple[Problem, int]],
    ends: torch.Tensor,
) -> list[dict[str, Any]]:
    """Journal entries of one batch: texts, tokens before the end, forward passes and the tokens these fed through the
    model, and seconds (the batch's, shared)."""
    began = time.perf_counter()
    width = max(len(problem.ids) for problem, _ in batch)
    ids = torch.full((len(batch), width), tokenizer.pad_token_id)
    mask = torch.zeros_like(ids)
    for row, (problem, _) in enumerate(batch):
        ids[row, width - len(problem.ids) :] = torch.tensor(problem.ids)
        mask[row, width - len(problem.ids) :] = 1
    sampled = rollout(
        model,
        ids.to(ends.device),
        mask.to(ends.device),
        sampling_settings(args),
        mask_token_id=tokenizer.mask_token_id,
        generator=[keyed_generator(args.seed, problem.index, sample) for problem, sample in batch],
        eos_token_ids=ends.tolist() if args.eos_stop else None,
    )
    output = sampled.ids[:, width:]
    lengths = (torch.isin(output, ends).cumsum(1) == 0).sum(1).tolist()
    seconds = (time.perf_counter() - began) / len(batch)
    return [
        {
            "index": problem.index,
            "sample": sample,
            "generations": tokenizer.decode(row),
            "text": tokenizer.decode(row[:length], skip_special_tokens=True),
            "tokens": length,
            "forward_passes": passes,
            "forward_tokens": fed,
            "seconds": seconds,
        }
        for (problem, sample), row, length, passes, fed in zip(
            batch, output.tolist(), lengths, sampled.passes.tolist(), sampled.tokens.tolist(), strict=True
        )
    ]
