"""Sampling from a stream of prompts: the next prompt takes the place of a finished row, so the batch stays full.

Steps and caches are those of `rollout`; this module only decides which rows take part, and in which columns.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from itertools import islice
from typing import Any

import torch
from torch import Generator
from torch.nn.functional import pad

from d1.models.attention import require_prepared
from d1.models.kinds import block_size
from d1.sampling.blocks import Sampler, check_sampler
from d1.sampling.caches import cache_of
from d1.sampling.canvas import Batch, Canvas, Row, start_canvas
from d1.sampling.loop import Rollout, blank_record, note
from d1.sampling.settings import SamplingSettings

Prompt = tuple[Sequence[int], Generator | None]  # ids without padding, and the row's generator where sampling draws
Finished = tuple[list[int], Rollout]


def rollout_stream(
    model: Any,
    prompts: Iterable[Prompt],
    settings: SamplingSettings,
    *,
    batch_size: int,
    mask_token_id: int,
    noise_dtype: torch.dtype = torch.float32,
    eos_token_ids: Sequence[int] | None = None,
) -> Iterator[Finished]:
    """Sample a completion for each prompt, at most `batch_size` of them at a time.

    A row leaves when its last block is filled or, with the EOS stop, when the block with its first EOS is filled. Only
    then is the next prompt taken from `prompts`, so that several processes can share one queue. Without a cache, a row
    begins its next block as soon as its block is full; with a cache, all rows begin their blocks together.

    Rows equal those of `rollout` with one generator per row: in fp32 they depend neither on the batch nor on the order
    of the prompts.

    Args:
        prompts: (ids, generator) each; the generator may be None if sampling draws nothing. The batch is as wide as its
            longest prompt: sort prompts by length, the longest first, for the least padding.
        batch_size: rows at a time.
        eos_token_ids: the EOS stop, as in `rollout`.

    Yields:
        (numbers, rollout): for the rows that ended in one step, the places of their prompts in the stream, and their
        `Rollout`, whose ids are padded on the left with mask tokens.

    Raises:
        ValueError: at the call, if the model is not prepared or an argument is wrong; later, if a prompt needs a
            generator and has none.
    """
    require_prepared(model)
    check_sampler(settings, model.config)
    if batch_size < 1:
        raise ValueError(f"batch_size must be at least 1, got {batch_size}")
    sampler = Sampler(model, settings, mask_token_id, noise_dtype)
    return sample_all(sampler, enumerate(prompts), batch_size, eos_token_ids or ())


@torch.no_grad()
def sample_all(
    sampler: Sampler, prompts: Iterator[tuple[int, Prompt]], batch_size: int, ends: Sequence[int]
) -> Iterator[Finished]:
    """`rollout_stream` after the check of its arguments."""
    cache, length = cache_of(sampler.model.config, sampler.settings.cache), sampler.settings.gen_length
    none = torch.zeros(0, 0, dtype=torch.long, device=sampler.model.device)
    batch = Batch.of([], start_canvas(none, none, length, 0))
    record = blank_record(0, length, none.device)
    passes = sampler.passes(cache, device=none.device, masked=True, aligned=False)
    while True:
        # Here each row has a full block, or is new, or (only without a cache) is in the middle of its block.
        everyone = range(len(batch.rows))
        done = batch.finished([*everyone], ends)
        if done:
            canvas, rows = batch.canvas, batch.upload(done)
            taken = Rollout.of(canvas.ids[rows], record[:, rows], canvas.passes[rows], canvas.forward_tokens[rows])
            yield [batch.rows[row].number for row in done], taken
        kept = [row for row in everyone if row not in set(done)]
        room = batch_size - len(kept)
        new = list(islice(prompts, room)) if room else []
        if done or new:
            batch = exchange(sampler, batch, kept, new)
            blank = blank_record(len(new), length, none.device)
            record = torch.cat([record[:, batch.upload(kept)], blank], dim=1)
        if not batch.rows:
            return
        live = [*range(len(batch.rows))]
        passes.masked = cache.together or any(row.prompt < batch.canvas.start for row in batch.rows)
        passes.enter(batch.open_blocks(live), kept)
        for step in sampler.fill_blocks(batch, live, passes, cache.together):
            note(record, step, batch.canvas.start)


def exchange(sampler: Sampler, batch: Batch, kept: list[int], new: list[tuple[int, Prompt]]) -> Batch:
    """A batch of the rows `kept`, then those of the prompts `new`, as wide as the longest prompt among them."""
    settings, masks = sampler.settings, sampler.mask_token_id
    rows = [batch.rows[row] for row in kept]
    for number, (ids, generator) in new:
        if settings.draws and generator is None:
            raise ValueError(f"prompt {number} of the stream has no generator, and these settings draw random numbers")
        inside = len(ids) % settings.block_length if block_size(sampler.model.config) else None
        rows.append(Row(number, len(ids), len(ids), settings.schedule(inside), generator))
    width = max((row.prompt for row in rows), default=0)
    prompts, mask = torch.full((len(new), width), masks), torch.zeros(len(new), width, dtype=torch.long)
    for place, (_, (ids, _)) in enumerate(new):
        prompts[place, width - len(ids) :] = torch.as_tensor(ids)
        mask[place, width - len(ids) :] = 1
    old, stay = batch.canvas, batch.upload(kept)
    fresh = start_canvas(prompts.to(stay.device), mask.to(stay.device), settings.gen_length, masks)
    wider = (width - old.start, 0)  # a negative number cuts columns off, which are all padding
    canvas = Canvas(
        ids=torch.cat([pad(old.ids[stay], wider, value=masks), fresh.ids]),
        visible=torch.cat([pad(old.visible[stay], wider), fresh.visible]),
        given=torch.cat([pad(old.given[stay], wider), fresh.given]),
        places=torch.arange(width, width + settings.gen_length, device=stay.device).expand(len(rows), -1),
        passes=torch.cat([old.passes[stay], fresh.passes]),
        forward_tokens=torch.cat([old.forward_tokens[stay], fresh.forward_tokens]),
    )
    both = Batch.of(rows, canvas)
    wider = (0, both.hidden.shape[1] - batch.hidden.shape[1])
    both.hidden = pad(batch.hidden[stay], (*wider, 0, len(new)))
    return both
