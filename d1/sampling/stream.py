"""Sampling from a stream of prompts: a row that is finished makes room for the next prompt, and the batch stays full.

The rows of the batch stand at different blocks of their canvases, and each one gets what `rollout` gives it. The steps
are made of `rollout`'s parts; only which rows take part, and at which places, is decided here.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import islice
from typing import Any

import torch
from torch import Generator, Tensor
from torch.nn.functional import pad

from d1.models.attention import require_prepared
from d1.models.kinds import block_size
from d1.sampling.blocks import Canvas, check_sampler, choose, run_body, start_canvas
from d1.sampling.caching import Passes
from d1.sampling.loop import Rollout
from d1.sampling.predict import predict, uniform
from d1.sampling.settings import SamplingSettings
from d1.sampling.stream_caching import BlockWindows, CacheWindows, DelayedWindows, LastingWindows, Place

Prompt = tuple[Sequence[int], Generator | None]  # ids without padding, and the row's generator where sampling draws
Finished = tuple[list[int], Rollout]


@dataclass
class Row:
    """How far one row of the batch is. `number` is its prompt's place in the stream, `prompt` its prompt's tokens."""

    number: int
    generator: Generator | None
    prompt: int
    schedule: list[list[int]]
    block: int = -1
    step: int = 0
    left: int = 0  # tokens that the block still hides

    @property
    def filled(self) -> int:
        """Tokens of the completion before the block."""
        return sum(map(sum, self.schedule[: max(self.block, 0)]))

    @property
    def size(self) -> int:
        return sum(self.schedule[self.block])

    @property
    def due(self) -> int:
        """How many tokens the next step reveals at least."""
        return max(1, sum(self.schedule[self.block][: self.step + 1]) - (self.size - self.left))

    @property
    def is_whole(self) -> bool:
        return self.left == 0 and self.block == len(self.schedule) - 1

    def place(self) -> Place:
        return Place(self.prompt, self.prompt + self.filled, self.prompt + self.filled + self.size)


@dataclass
class Batch:
    """The rows at work: `canvas` and, at each token of a completion, `record` (3, rows, gen_length) of log-probs,
    entropies and steps as in `Rollout`, and `hidden` (rows, block) places of their blocks."""

    rows: list[Row]
    canvas: Canvas
    record: Tensor
    hidden: Tensor


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
    """Samples a completion for each prompt, at most `batch_size` of them at a time.

    A row leaves when its last block is filled or, with the EOS stop, the block that holds its first end; then the next
    prompt is taken from `prompts`, and no sooner, so that several processes may take from one queue. Without a cache a
    row goes on to its next block as soon as its block is full. A cache is filled at the start of a block, so there the
    rows begin their blocks together, and one that is full early waits outside the batch, as it does in `rollout`.

    Rows are those of `rollout` with one generator a row: in fp32 they depend neither on the batch nor on the order of
    the prompts. In 16 bits rounding differs in batches of other shapes, and a token now and then.

    Args:
        prompts: (ids, generator) each; the generator may be None where nothing is drawn. They are taken in their order,
            and the batch is as wide as its longest prompt: prompts sorted by length, the longest first, need the least
            padding, and one that does not fit fails at once.
        batch_size: rows at a time. A forward pass holds as much as one of `rollout` with so many rows, with guidance
            twice as many; a block-causal model's cache holds the finished blocks of these rows.
        eos_token_ids: the EOS stop, as in `rollout`.

    Yields:
        (numbers, rollout): the rows that ended in one step, by their prompts' place in the stream, and what `rollout`
        gives for them. The longest prompt among them, and the batch, decide the padding on the left, of mask tokens.

    Raises:
        ValueError: the model is not prepared or an argument makes no sense, at the call; or a prompt comes without a
            generator and needs one.
    """
    require_prepared(model)
    check_sampler(settings, model.config)
    if batch_size < 1:
        raise ValueError(f"batch_size must be at least 1, got {batch_size}")
    guess = partial(predict, model, settings=settings, mask_token_id=mask_token_id, noise_dtype=noise_dtype)
    taken = enumerate(prompts)
    return sample_all(model, taken, settings, guess, batch_size, mask_token_id, list(eos_token_ids or []))


@torch.no_grad()
def sample_all(
    model: Any,
    prompts: Iterator[tuple[int, Prompt]],
    settings: SamplingSettings,
    guess: Callable[..., tuple[Tensor, Tensor, Tensor]],
    batch_size: int,
    mask_token_id: int,
    ends: list[int],
) -> Iterator[Finished]:
    """`rollout_stream`, its arguments checked."""
    branches = 2 if settings.cfg_scale else 1
    unprompted = mask_token_id if settings.cfg_scale else None
    windows: CacheWindows | DelayedWindows | LastingWindows | BlockWindows | None = None  # None: every pass feeds all
    if block_size(model.config):
        windows = BlockWindows(model, branches)
    elif settings.cache == "delayed":
        windows = DelayedWindows(model, branches, mask_token_id)
    elif settings.cache == "lasting":
        windows = LastingWindows(model, branches, mask_token_id)
    elif settings.cache is not None:
        windows = CacheWindows(model, settings.cache, branches)

    batch = nobody(settings, model.device)
    while True:
        # Here every row is full, new or, without a cache, in the middle of its block.
        done = finished(batch, ends)
        if done:
            yield [batch.rows[row].number for row in done], results(batch, done)
        kept = [row for row in range(len(batch.rows)) if row not in set(done)]
        room = batch_size - len(kept)
        new = list(islice(prompts, room)) if room else []
        if done or new:
            batch = exchange(batch, kept, new, settings, block_size(model.config), mask_token_id)
        if not batch.rows:
            return
        open_blocks(batch)
        if windows is not None:
            windows.enter([row.place() for row in batch.rows], kept, batch.canvas.start)
        padded = any(row.prompt < batch.canvas.start for row in batch.rows)
        source = windows or Passes(model, None, padded)
        live = list(range(len(batch.rows)))
        while True:
            take_step(batch, live, source, guess, settings, unprompted)
            working = [i for i, row in enumerate(live) if batch.rows[row].left]
            if not working or (windows is None and len(working) < len(live)):
                break
            if len(working) < len(live):
                picked = torch.tensor(working, device=batch.canvas.ids.device)
                source.keep(torch.cat([picked + branch * len(live) for branch in range(branches)]))
                live = [live[i] for i in working]


def nobody(settings: SamplingSettings, device: torch.device) -> Batch:
    """A batch without rows."""
    none = torch.zeros(0, 0, dtype=torch.long, device=device)
    canvas = start_canvas(none, none, settings.gen_length, 0)
    longest = min(settings.block_length, settings.gen_length)
    record = torch.zeros(3, 0, settings.gen_length, device=device)
    return Batch([], canvas, record, torch.zeros(0, longest, dtype=torch.bool, device=device))


def finished(batch: Batch, ends: list[int]) -> list[int]:
    """The rows that are whole, and those that the EOS stop ends: their later blocks are filled."""
    done = [row for row, state in enumerate(batch.rows) if state.is_whole]
    between = [row for row, state in enumerate(batch.rows) if state.left == 0 and not state.is_whole]
    if not ends or not between:
        return done
    completions = batch.canvas.ids[:, batch.canvas.start :]
    rows = torch.tensor(between, device=completions.device)
    filled = rows.new_tensor([batch.rows[row].filled + batch.rows[row].size for row in between]).unsqueeze(1)
    behind = torch.arange(completions.shape[1], device=filled.device) >= filled
    ended = (torch.isin(completions[rows], rows.new_tensor(ends)) & ~behind).any(1)
    completions[rows] = completions[rows].masked_fill(ended.unsqueeze(1) & behind, ends[0])
    return sorted([*done, *(row for row, over in zip(between, ended.tolist(), strict=True) if over)])


def results(batch: Batch, done: list[int]) -> Rollout:
    rows = torch.tensor(done, device=batch.record.device)
    canvas, (logps, entropies, numbers) = batch.canvas, batch.record[:, rows]
    return Rollout(canvas.ids[rows], logps, numbers.long(), entropies, canvas.passes[rows], canvas.forward_tokens[rows])


def exchange(
    batch: Batch,
    kept: list[int],
    new: list[tuple[int, Prompt]],
    settings: SamplingSettings,
    own_blocks: int | None,
    mask_token_id: int,
) -> Batch:
    """The rows `kept` and, behind them, those of the prompts `new`, as wide as the longest prompt among them."""
    rows = [batch.rows[row] for row in kept]
    for number, (ids, generator) in new:
        if settings.draws and generator is None:
            raise ValueError(f"prompt {number} of the stream has no generator, and these settings draw random numbers")
        inside = None if own_blocks is None else len(ids) % settings.block_length
        rows.append(Row(number, generator, len(ids), settings.schedule(inside)))
    width = max((row.prompt for row in rows), default=0)
    old, device = batch.canvas, batch.record.device
    prompts, mask = torch.full((len(new), width), mask_token_id), torch.zeros(len(new), width, dtype=torch.long)
    for place, (_, (ids, _)) in enumerate(new):
        prompts[place, width - len(ids) :] = torch.as_tensor(ids)
        mask[place, width - len(ids) :] = 1
    fresh = start_canvas(prompts.to(device), mask.to(device), settings.gen_length, mask_token_id)
    stay = torch.tensor(kept, dtype=torch.long, device=device)
    wider = (width - old.start, 0)  # negative: cut off, and it is padding
    canvas = Canvas(
        ids=torch.cat([pad(old.ids[stay], wider, value=mask_token_id), fresh.ids]),
        visible=torch.cat([pad(old.visible[stay], wider), fresh.visible]),
        given=torch.cat([pad(old.given[stay], wider), fresh.given]),
        places=torch.arange(width, width + settings.gen_length, device=device).expand(len(rows), -1),
        passes=torch.cat([old.passes[stay], fresh.passes]),
        forward_tokens=torch.cat([old.forward_tokens[stay], fresh.forward_tokens]),
    )
    record = torch.zeros(3, len(rows), settings.gen_length, device=device)
    record[2] = -1
    record[:, : len(kept)] = batch.record[:, stay]
    return Batch(rows, canvas, record, pad(batch.hidden[stay], (0, 0, 0, len(new))))


def open_blocks(batch: Batch) -> None:
    """Lets the rows whose block is full, or that have none yet, begin the next."""
    opened = [row for row, state in enumerate(batch.rows) if state.left == 0]
    for row in opened:
        state = batch.rows[row]
        state.block, state.step = state.block + 1, 0
        state.left = state.size
    sizes = torch.tensor([batch.rows[row].size for row in opened]).unsqueeze(1)
    hidden = (torch.arange(batch.hidden.shape[1]) < sizes).to(batch.hidden.device, non_blocking=True)
    batch.hidden[torch.tensor(opened, dtype=torch.long, device=hidden.device)] = hidden


def take_step(
    batch: Batch,
    live: list[int],
    source: Any,
    guess: Callable[..., tuple[Tensor, Tensor, Tensor]],
    settings: SamplingSettings,
    unprompted: int | None,
) -> None:
    """One forward pass of the rows `live`, each at its own block and step (`blocks.fill_block`, row by row)."""
    canvas, states, device = batch.canvas, [batch.rows[row] for row in live], batch.record.device
    numbers = torch.tensor([live, [state.filled for state in states], [state.due for state in states]])
    rows, filled, due = numbers.to(device, non_blocking=True)
    left = [state.left for state in states]
    hidden = batch.hidden[rows]
    slots = hidden.logical_not().byte().argsort(dim=1, stable=True)[:, : max(left)]
    still = hidden.gather(1, slots)
    # Behind a block that is shorter than another row's come places of no use, all different: `at` writes to each once.
    places = (filled.unsqueeze(1) + slots) % settings.gen_length
    positions = canvas.start + places
    taken = canvas.passes[rows].unsqueeze(1)
    found = run_body(canvas, source, rows, positions, unprompted)
    own: Any = [state.generator for state in states] if settings.draws else None
    ids, logps, entropies = guess(found, left, generator=own)
    draw = partial(uniform, logps.shape, own, logps, left)
    chosen = choose(settings, logps, entropies, still, due, draw)
    at = (rows.unsqueeze(1), positions)
    canvas.ids[at] = torch.where(chosen, ids, canvas.ids[at])
    now = torch.stack([logps, entropies, taken.expand_as(logps).float()])
    record = (slice(None), rows.unsqueeze(1), places)
    batch.record[record] = torch.where(chosen, now, batch.record[record])
    batch.hidden[rows] = hidden = hidden.scatter(1, slots, still & ~chosen)
    counts = None if settings.rule is None else hidden.sum(1).tolist()
    for place, state in enumerate(states):
        state.left = state.left - state.due if counts is None else counts[place]
        state.step += 1
