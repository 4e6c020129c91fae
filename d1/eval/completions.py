"""Generate the completions that an evaluation's journal lacks, with full batches, in one or several processes.

In fp32 no row depends on the others in its batch: each process takes rows from the queue one by one, when its batch has
room. In 16 bits a row's tokens sometimes depend on the other rows. So there the queue holds whole parts of the run,
which depend neither on what is left to do nor on the number of processes. Each part has its own batches, and a part
that was interrupted is generated again as a whole.
"""

from __future__ import annotations

import argparse
import logging
import os
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from datetime import timedelta
from itertools import chain
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from tqdm import tqdm

from d1.eval.journal import Journal
from d1.eval.setup import Prompt, in_fp32, part_size
from d1.masking import keyed_generator
from d1.models.fit import check_memory
from d1.models.head import NotFiniteError
from d1.models.kinds import check_room
from d1.models.load import load_on_device, named_dtype
from d1.models.tokenizer import end_ids
from d1.sampling import eos_cut, rollout_stream
from d1.sampling.flags import sampling_settings

logger = logging.getLogger("eval")

T = TypeVar("T")
STORE: list[dist.Store] = []  # the processes' shared counters; empty for a single process


def join_processes() -> tuple[int, int]:
    """(rank, number of processes), as torchrun or accelerate started them."""
    world = int(os.environ.get("WORLD_SIZE", "1"))
    if world > 1:
        patience = timedelta(days=7)  # a rank may be hours behind another
        store, rank, _ = next(dist.rendezvous("env://", timeout=patience))
        STORE[:] = [dist.PrefixStore("eval", store)]
        dist.init_process_group(
            "gloo", store=dist.PrefixStore("gloo", store), rank=rank, world_size=world, timeout=patience
        )
    return int(os.environ.get("RANK", "0")), world


def leave_processes() -> None:
    if dist.is_initialized():
        dist.destroy_process_group()
    STORE.clear()


def queue_of(items: Sequence[T], name: str) -> Iterator[T]:
    """`items` in their order, each given to one process only: the next that asks. Use each name once per launch."""
    if not STORE:
        yield from items
        return
    while (number := STORE[0].add(f"{name} taken", 1) - 1) < len(items):
        yield items[number]


def wait_for_all() -> None:
    if dist.is_initialized():
        dist.barrier()


def complete(
    args: argparse.Namespace, load: Callable[[], Any], tokenizer: Any, prompts: Iterable[Prompt], journal: Journal
) -> None:
    """Generates the completions that the journal lacks and appends each when it ends; returns when all processes are
    done."""
    # The longest prompts come first: batches need little padding, and one that does not fit fails at once.
    every = sorted(prompts, key=lambda prompt: -len(prompt.ids))
    size = part_size(args)
    wanted = {prompt.key for prompt in every}
    done = journal.read().keys() & wanted
    wait_for_all()  # no process writes before all have read
    if done and journal.rank == 0:
        logger.info("Resuming: %d of %d completions are done", len(done), len(every))
    parts = [every[start : start + size] for start in range(0, len(every), size)]
    parts = [part for part in parts if any(prompt.key not in done for prompt in part)]
    if parts:
        model = load()
        check_room(model.config, len(parts[0][0].ids), args.gen_length)
        ends = torch.tensor(end_ids(tokenizer), device=model.device)
        mine = queue_of(parts, journal.setup)
        bar = {"total": len(every) - len(done), "desc": journal.setup, "unit": "problem", "disable": journal.rank != 0}
        with tqdm(**bar) as progress:
            for asked in [chain.from_iterable(mine)] if in_fp32(args) else mine:
                for _, entry in generate_rows(args, model, tokenizer, asked, ends, args.batch_size):
                    if entry["index"] not in done:
                        journal.append(entry)
                        progress.update(STORE[0].add(f"{journal.setup} done", 1) - progress.n if STORE else 1)
    wait_for_all()


def load_model_for(args: argparse.Namespace) -> Any:
    """The model on this process's device; the log of the first process says in which dtype."""
    if not dist.is_initialized() or dist.get_rank() == 0:
        where = "a GPU" if torch.cuda.is_available() else "a CPU"
        logger.info("Loading %s as %s, on %s", args.model_path, str(named_dtype(args.dtype)).split(".")[-1], where)
    check_memory(args.model_path, args.dtype, args.checkpoint_path or None)
    return load_on_device(
        args.model_path,
        args.dtype,
        adapter=args.checkpoint_path or None,
        attn_implementation=args.attn_implementation,
    )


def generate_rows(
    args: argparse.Namespace,
    model: Any,
    tokenizer: Any,
    prompts: Iterable[Prompt],
    ends: torch.Tensor,
    batch_size: int,
) -> Iterator[tuple[int, dict[str, Any]]]:
    """Each prompt's number and journal entry, as soon as its row ends; the next prompt is taken when there is room.

    Entries use the names of the generation files: texts, `tokens` generated before the end, `forward_passes`,
    `forward_tokens` (tokens processed in these passes), and `seconds`: the time since the last rows ended, divided by
    the number of rows that ended together, so that the sum over all rows is the total time. A sampler that edits adds
    `edits` and `first_text`, the text of the tokens that were written first.
    """
    asked: dict[int, Prompt] = {}

    def rows() -> Iterator[tuple[list[int], torch.Generator]]:
        for number, prompt in enumerate(prompts):
            asked[number] = prompt
            yield prompt.ids, keyed_generator(args.seed, prompt.index, prompt.sample)

    stream = rollout_stream(
        model,
        rows(),
        sampling_settings(vars(args), model.config),
        batch_size=batch_size,
        mask_token_id=tokenizer.mask_token_id,
        eos_token_ids=ends.tolist() if args.eos_stop else None,
    )
    began = time.perf_counter()
    for numbers, sampled in named(stream, asked):
        output, first = sampled.ids[:, -args.gen_length :], sampled.first_ids[:, -args.gen_length :]
        lengths, first_lengths = (eos_cut(ids, ends, including=False).sum(1).tolist() for ids in (output, first))
        seconds, began = (time.perf_counter() - began) / len(numbers), time.perf_counter()
        counts = sampled.passes.tolist(), sampled.forward_tokens.tolist(), sampled.edits.tolist()
        drafts = zip(first.tolist(), first_lengths, strict=True)
        columns = (numbers, output.tolist(), lengths, *counts, drafts)
        for number, row, length, passes, fed, edits, (draft, kept) in zip(*columns, strict=True):
            entry = {
                "index": asked.pop(number).key,
                "generations": tokenizer.decode(row),
                "text": tokenizer.decode(row[:length], skip_special_tokens=True),
                "tokens": length,
                "forward_passes": passes,
                "forward_tokens": fed,
                "seconds": seconds,
            }
            if sampled.writes is not None:
                entry["edits"] = edits
                entry["first_text"] = tokenizer.decode(draft[:kept], skip_special_tokens=True)
            yield number, entry


def named(stream: Iterable[T], asked: Mapping[int, Prompt]) -> Iterator[T]:
    """The `stream`, whose NotFiniteError names the problem of its row."""
    try:
        yield from stream
    except NotFiniteError as error:
        raise error.named(f"problem {asked[error.number].key}") from error
