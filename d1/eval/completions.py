"""Generates the completions that are missing of an evaluation into the journal, with the batch kept full.

In fp32 no row depends on those beside it, and each process takes rows from the queue one by one, as its batch has room.
In 16 bits a row's tokens depend on them now and then. So there the queue holds whole parts of the run: they are the
same whatever is left to do and however many processes share them, a part has its batch for itself, and one that a kill
left half done is generated again, whole.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable, Iterable, Iterator
from itertools import chain
from typing import Any

import torch
from tqdm import tqdm

from d1.eval.identity import in_fp32, part_size
from d1.eval.journal import Journal, Key
from d1.eval.processes import STORE, count_together, queue_of
from d1.eval.prompts import Prompt
from d1.masking import keyed_generator
from d1.models.load import load_on_device
from d1.models.tokenizer import end_ids
from d1.sampling import rollout_stream
from d1.sampling.flags import sampling_settings
from d1.sampling.settings import check_room

Request = tuple[Prompt, int]  # what one completion answers: a prompt, and which of its samples it is


def key_of(row: Request) -> Key:
    return row[0].index, row[1]


def all_parts(args: argparse.Namespace, prompts: Iterable[Prompt]) -> list[list[Request]]:
    """The rows of a run in the parts that processes take, a function of these arguments alone.

    The longest prompts come first: batches need little padding, and one that does not fit fails at once.
    """
    rows = [(prompt, sample) for prompt in prompts for sample in range(args.num_samples)]
    rows.sort(key=lambda row: -len(row[0].ids))
    size = part_size(args)
    return [rows[start : start + size] for start in range(0, len(rows), size)]


def unfinished(parts: list[list[Request]], done: dict[Key, dict[str, Any]]) -> list[list[Request]]:
    """The parts that are not all in `done`."""
    return [part for part in parts if any(key_of(row) not in done for row in part)]


def generate_missing(
    args: argparse.Namespace,
    load: Callable[[], Any],
    tokenizer: Any,
    parts: list[list[Request]],
    done: dict[Key, dict[str, Any]],
    journal: Journal,
    take: Callable[[list[list[Request]], str], Iterable[list[Request]]] = queue_of,
) -> None:
    """Generates the `parts` that this process gets, and journals what is not `done` of them, each row as it ends.

    Args:
        load: gives the model, and is called only if a part is missing.
        take: gives this process its parts of the setup of that name, the next one when it is asked for.
    """
    if not parts:
        return
    model = load()
    check_room(model.config, max(len(prompt.ids) for part in parts for prompt, _ in part), args.gen_length)
    ends = torch.tensor(end_ids(tokenizer), device=model.device)
    generated, passes, rows, started = 0, 0, 0, time.perf_counter()
    missing = sum(key_of(row) not in done for part in parts for row in part)
    mine = take(parts, journal.setup)
    with tqdm(total=missing, desc=journal.setup, unit="problem", disable=journal.rank != 0) as progress:
        for requests in [chain.from_iterable(mine)] if in_fp32(args) else mine:
            for _, entry in generate_rows(args, model, tokenizer, requests, ends, args.batch_size):
                generated, passes, rows = generated + entry["tokens"], passes + entry["forward_passes"], rows + 1
                if (entry["index"], entry["sample"]) in done:
                    continue
                journal.append(entry)
                progress.update(count_together(f"{journal.setup} done", 1) - progress.n if STORE else 1)
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


def generate_rows(
    args: argparse.Namespace,
    model: Any,
    tokenizer: Any,
    requests: Iterable[Request],
    ends: torch.Tensor,
    batch_size: int,
) -> Iterator[tuple[int, dict[str, Any]]]:
    """Each request's number and journal entry, as its row ends; the next request is taken when there is room for it.

    Entries hold, under the names of the generation files, texts, `tokens` generated before the end, `forward_passes`,
    `forward_tokens` that these fed through the model, and `seconds` since rows ended before, shared by those that ended
    together: over all rows they add up to the time that it took.
    """
    asked: dict[int, Request] = {}

    def prompts() -> Iterator[tuple[list[int], torch.Generator]]:
        for number, (prompt, sample) in enumerate(requests):
            asked[number] = prompt, sample
            yield prompt.ids, keyed_generator(args.seed, prompt.index, sample)

    stream = rollout_stream(
        model,
        prompts(),
        sampling_settings(vars(args), model.config),
        batch_size=batch_size,
        mask_token_id=tokenizer.mask_token_id,
        eos_token_ids=ends.tolist() if args.eos_stop else None,
    )
    began = time.perf_counter()
    for numbers, sampled in stream:
        output = sampled.ids[:, -args.gen_length :]
        lengths = (torch.isin(output, ends).cumsum(1) == 0).sum(1).tolist()
        seconds, began = (time.perf_counter() - began) / len(numbers), time.perf_counter()
        for number, row, length, passes, fed in zip(
            numbers, output.tolist(), lengths, sampled.passes.tolist(), sampled.forward_tokens.tolist(), strict=True
        ):
            prompt, sample = asked.pop(number)
            yield (
                number,
                {
                    "index": prompt.index,
                    "sample": sample,
                    "generations": tokenizer.decode(row),
                    "text": tokenizer.decode(row[:length], skip_special_tokens=True),
                    "tokens": length,
                    "forward_passes": passes,
                    "forward_tokens": fed,
                    "seconds": seconds,
                },
            )
