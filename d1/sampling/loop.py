"""The reverse process: prompt -> completion, block by block (LLaDA, arXiv 2502.09992, section 2.4 and appendix B).

A canvas of `gen_length` mask tokens follows the prompt. Blocks are filled from left to right; in each step the model
(`passes.py`, `caches.py`) predicts every masked token of the current block (`predict.py`), and some of the predictions
are kept (`reveal.py`).
"""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import cache, partial
from itertools import chain, compress
from math import lcm
from typing import Any

import torch
from torch import Generator, Tensor

from d1.masking import token_ids
from d1.models.attention import has_causal_context, require_prepared
from d1.models.head import NotFiniteError, why_not_finite
from d1.models.kinds import block_size
from d1.sampling.caches import Cache, cache_of
from d1.sampling.other_samplers import other_sampler
from d1.sampling.passes import Block, Columns, Passes
from d1.sampling.predict import Generators, predict, uniform
from d1.sampling.record import Canvas, Rollout, Step, rollout_of, start_canvas
from d1.sampling.reveal import REMASKING, RULES
from d1.sampling.settings import SamplingSettings, check_sampler

logger = logging.getLogger(__name__)
Stops = Callable[[Sequence[int]], bool]  # whether a completion that begins with these ids ends with them

# --- The canvas, the progress of each row, and the EOS stop, which decides which rows leave ---------------------------


def eos_cut(completion_ids: Tensor, eos_token_ids: Sequence[int] | Tensor, including: bool = True) -> Tensor:
    """(rows, tokens) bool: true before each row's first EOS and, if `including`, at it; all true without an EOS."""
    is_eos = torch.isin(completion_ids, torch.as_tensor(eos_token_ids, device=completion_ids.device))
    return is_eos.cumsum(-1) - is_eos.long() * including == 0


@dataclass
class Row:
    """The progress of one row."""

    number: int  # of its prompt in the batch or the stream
    prompt: int  # positions before the completion that passes process: the prompt's tokens, with or without padding
    inside: int  # of these, those from a start of a block of a block-causal model to the completion
    schedule: list[list[int]]  # tokens revealed in each step of each block
    generator: Generator | None = None  # its own; None if it draws nothing or draws from the generator of the batch
    block: int = -1  # current block and step, from 0
    step: int = 0
    filled: int = 0  # tokens of the completion before the block
    left: int = 0  # tokens that the next pass predicts: those that the block hides, or with editing all; 0: it is done
    hides: int = 0  # with editing, tokens that the block still hides
    post: int = 0  # with editing, passes since it hid none
    stops: Stops | None = None  # another end of the completion than an EOS, for the EOS stop
    columns: Columns | None = None  # of its text's first tokens; `prompt` is then without padding
    # In a stream whose rows differ:
    settings: SamplingSettings | None = None  # what its tokens are drawn by; None: what the sampler's are
    ends: tuple[int, ...] = ()  # of the EOS stop
    first_token: str | None = None  # of the settings; not None: the model has a causal context
    offset: int = 0  # by how much the batch's longest completion is longer: this row's prompt ends that much later

    @property
    def length(self) -> int:
        """Tokens of the completion."""
        return sum(map(sum, self.schedule))

    def shift(self, more: int) -> None:
        """Continues in a batch whose longest completion is longer by `more` tokens than before."""
        self.offset, self.filled = self.offset + more, self.filled + more
        self.prompt, self.inside = self.prompt - more, self.inside - more

    @property
    def size(self) -> int:
        return sum(self.schedule[self.block])

    @property
    def later(self) -> int:
        """How many tokens of the block the schedule leaves to the steps after the next."""
        return sum(self.schedule[self.block][self.step + 1 :])

    @property
    def is_whole(self) -> bool:
        return self.left == 0 and self.block == len(self.schedule) - 1

    def open_block(self) -> None:
        """Begin the next block."""
        self.filled += self.size if self.block >= 0 else 0
        self.block, self.step, self.post = self.block + 1, 0, 0
        self.left = self.hides = self.size

    def edited(self, hides: int, edits: int, post_steps: int) -> int:
        """What is `left` with editing after a pass that made `edits` edits and left `hides` tokens hidden: nothing
        after a pass over a full block without edits, or after `post_steps` of them."""
        had_masks, self.hides = self.hides > 0, hides
        self.post += not had_masks
        settled = not had_masks and not edits
        return 0 if not hides and (settled or self.post >= post_steps) else self.size


@dataclass
class Batch:
    """The rows at work and their canvas; rows without a generator of their own draw from that of the batch."""

    rows: list[Row]
    canvas: Canvas
    hidden: Tensor  # (rows, longest block) bool, what is still hidden in each row's current block
    generator: Generator | None = None

    @classmethod
    def of(cls, rows: list[Row], canvas: Canvas, generator: Generators = None) -> Batch:
        """A batch of new rows; if `generator` is a list, each row gets its own from it."""
        if isinstance(generator, Sequence):
            for row, own in zip(rows, generator, strict=True):
                row.generator = own
        longest = max((sum(block) for row in rows for block in row.schedule), default=0)
        hidden = torch.zeros(len(rows), longest, dtype=torch.bool, device=canvas.ids.device)
        return cls(rows, canvas, hidden, None if isinstance(generator, Sequence) else generator)

    def upload(self, numbers: Any) -> Tensor:
        """Copy whole numbers to the device, without waiting for it."""
        return torch.tensor(numbers, dtype=torch.long).to(self.hidden.device, non_blocking=True)

    def generators(self, rows: list[int]) -> Generators:
        """The generators of these rows, or that of the batch if they have none."""
        own = [self.rows[row].generator for row in rows]
        each = [generator for generator in own if generator is not None]
        return each if len(each) == len(own) else self.generator

    def open_blocks(self, live: list[int]) -> list[Block]:
        """Begin the next block of each row of `live` whose block is full, and return all their blocks."""
        opened = [row for row in live if self.rows[row].left == 0]
        for row in opened:
            self.rows[row].open_block()
        sizes = self.upload([self.rows[row].size for row in opened]).unsqueeze(1)
        self.hidden[self.upload(opened)] = torch.arange(self.hidden.shape[1], device=sizes.device) < sizes
        start, blocks = self.canvas.start, []
        for one in (self.rows[row] for row in live):
            first = start + one.filled
            causal = one.first_token == "causal"
            blocks.append(Block(first, first + one.size, start - one.prompt, start - one.inside, causal, one.columns))
        return blocks

    def stop(self, live: list[int]) -> None:
        """End the block of each row of `live` that has an EOS and, before it, nothing that is hidden: the rest of the
        block is filled with the EOS. For models with a causal context."""
        by_ends: dict[tuple[int, ...], list[int]] = {}
        for index in live:
            if self.rows[index].first_token is not None and self.rows[index].ends and self.rows[index].left:
                by_ends.setdefault(self.rows[index].ends, []).append(index)
        canvas, inside = self.canvas, torch.arange(self.hidden.shape[1], device=self.hidden.device)
        for ends, some in by_ends.items():
            numbers = self.upload([[index, self.rows[index].filled, self.rows[index].size] for index in some])
            rows, filled, sizes = numbers.T.unsqueeze(2)
            at = rows, canvas.to_fill[rows, (filled + inside) % canvas.to_fill.shape[1]]
            ids, hidden = canvas.ids[at], self.hidden[rows.squeeze(1)]
            is_end = torch.isin(ids, self.upload(ends)) & (hidden.cumsum(1) == 0) & (inside < sizes)
            ended = is_end.any(1, keepdim=True)
            canvas.ids[at] = torch.where(hidden & ended, ends[0], ids)
            self.hidden[rows.squeeze(1)] = hidden & ~ended
            for index in compress(some, ended.squeeze(1).tolist()):  # the step's host sync
                self.rows[index].left = 0

    def finished(self, live: list[int], ends: Sequence[int]) -> list[int]:
        """The rows of `live` that are whole or ended by the EOS stop, which fills the later blocks of a row."""
        done = [row for row in live if self.rows[row].is_whole]
        # Rows between two blocks: an EOS in what they have filled ends them.
        between = [row for row in live if self.rows[row].left == 0 and not self.rows[row].is_whole]
        if not ends or not between:
            return done
        rows, end_ids = self.upload(between), self.upload(ends)
        filled = self.upload([self.rows[row].filled + self.rows[row].size for row in between]).unsqueeze(1)
        firsts = self.upload([self.rows[row].offset for row in between]).unsqueeze(1)
        completions = self.canvas.ids[:, self.canvas.start :]
        own = completions[rows]
        positions = torch.arange(own.shape[1], device=own.device)
        hidden = positions >= filled
        ended = (torch.isin(own, end_ids) & ~hidden & (positions >= firsts)).any(1)
        if any(self.rows[row].stops for row in between):
            whole = zip(own.tolist(), (self.rows[row] for row in between), strict=True)
            also = [bool(row.stops and row.stops(ids[row.offset : row.filled + row.size])) for ids, row in whole]
            ended |= torch.tensor(also).to(ended.device, non_blocking=True)
        completions[rows] = own.masked_fill(ended.unsqueeze(1) & hidden, ends[0])
        return sorted([*done, *compress(between, ended.tolist())])  # the block's one host sync

    def leave_columns(self, live: list[int], done: Sequence[int], passes: Passes) -> None:
        """Fills the columns of the rows `done`, out of those of `live`, which entered the last block."""
        for index, columns in ((index, self.rows[row].columns) for index, row in enumerate(live) if row in done):
            if columns is not None and columns.wanted:
                passes.leave(index, columns)


# --- Steps: fill mask tokens block after block, with one forward pass per step ----------------------------------------


def prompt_lengths(config: Any, attention_mask: Tensor) -> list[int | None]:
    """The tokens of each prompt of a model with blocks; None for other models. With a causal context, a prompt needs at
    least one."""
    if block_size(config) is None:
        return [None] * len(attention_mask)
    lengths: list[int | None] = attention_mask.long().sum(1).tolist()
    if has_causal_context(config) and not all(lengths):
        raise ValueError("a prompt is empty: a model with a causal context predicts from at least one token")
    return lengths


def tokens_inside(config: Any, length: int | None, block_length: int) -> int | None:
    """Of a prompt's `prompt_lengths`, the tokens from the last position where a block of the model and a block of
    `block_length` begin together. With a causal context, blocks begin at the end of the prompt."""
    if length is None or has_causal_context(config):
        return None if length is None else 0
    return length % lcm(config.block_size, block_length)


@cache  # once per model
def warn_of_edits(name: str) -> None:
    logger.warning(
        "%s: its config does not say that it learnt to correct visible tokens (SFT with --edit_noise writes that; "
        "LLaDA2.1's does not). Edits by a model that was trained on masks alone spoil more than they correct",
        name,
    )


def keep(
    settings: SamplingSettings,
    logps: Tensor,
    entropies: Tensor,
    hidden: Tensor,
    due: Tensor,
    left: Sequence[int],
    generator: Generators,
) -> Tensor:
    """(n, k) bool, which predictions at `hidden` positions are kept: `due` (n,) by the schedule, or more by the
    rule."""
    draw = partial(uniform, logps.shape, generator, logps, left)
    scores = REMASKING[settings.remasking].scores(logps, entropies, draw).masked_fill(~hidden, -math.inf)
    sorted_by = scores.argsort(dim=-1, descending=True, stable=True)  # ties, such as confidences of 1: left first
    ranks = sorted_by.argsort(dim=-1)
    if settings.rule is not None:  # it counts how many of the best to reveal
        best = scores.gather(1, sorted_by), entropies.gather(1, sorted_by)
        certain = RULES[settings.rule].count(*best, settings.level)
        due = certain.maximum(due).minimum(hidden.sum(1))
    return ranks < due.unsqueeze(1)


@dataclass(frozen=True)
class Sampler:
    """How a model fills a canvas: what all steps share."""

    model: Any
    settings: SamplingSettings
    mask_token_id: int
    noise_dtype: torch.dtype

    def passes(self, cache: Cache, **options: Any) -> Passes:
        branches = 2 if self.settings.cfg_scale else 1
        return cache.passes(self.model, branches=branches, mask_token_id=self.mask_token_id, **options)

    def step(self, batch: Batch, live: list[int], passes: Passes) -> Step:
        """Run one forward pass of the n rows `live`; each row reveals tokens of its block. Tensors are (n, k), with k
        the most positions that a row predicts."""
        canvas, progress = batch.canvas, [batch.rows[row] for row in live]
        # Rows that predict the first token of a block from the clean text predict nothing else in that pass.
        opening = [row.first_token == "causal" and row.step == 0 for row in progress]
        left = [1 if alone else row.left for row, alone in zip(progress, opening, strict=True)]
        later = [row.later for row in progress]
        rows, filled, kept = batch.upload([live, [row.filled for row in progress], later])
        hidden = asked = batch.hidden[rows]
        if any(opening):
            waiting = batch.upload(opening).bool().unsqueeze(1).expand_as(hidden).clone()
            waiting[:, 0] = False
            asked = hidden & ~waiting
        own_settings = [row.settings or self.settings for row in progress]
        # No probability is above 2: without a threshold, nothing is edited.
        above = [2.0 if settings.edits is None else settings.edits for settings in own_settings]
        editing = min(above) < 2
        if editing:  # rows without edits predict what they hide
            if not getattr(self.model.config, "edit_noise", None):
                warn_of_edits(self.model.config.name_or_path)
            inside = torch.arange(hidden.shape[1], device=hidden.device) < batch.upload(left).unsqueeze(1)
            limits = torch.tensor(above).to(hidden.device, non_blocking=True).unsqueeze(1)
            asked = torch.where(limits < 2, inside, hidden)
        # Each row's positions in its block to predict, ascending; a row with fewer is padded with other, distinct ones.
        within = asked.logical_not().byte().argsort(dim=1, stable=True)[:, : max(left)]
        indices = (filled.unsqueeze(1) + within) % canvas.to_fill.shape[1]
        positions, still = canvas.to_fill[rows.unsqueeze(1), indices], (hidden & asked).gather(1, within)
        numbers = canvas.passes[rows]
        found = self.states(canvas, passes, rows, positions)
        due = (still.sum(1) - kept).clamp(min=1)
        ids, logps, entropies, record_logps, chosen = self.decide(batch, live, found, still, due, left)
        # Write what was kept. No host sync: a schedule says how many tokens are left, unless a rule or an edit decides.
        at = (rows.unsqueeze(1), positions)
        if editing:
            edited = asked.gather(1, within) & ~still & (ids != canvas.ids[at]) & (logps.exp() > limits)
            chosen = chosen | edited
        canvas.ids[at] = torch.where(chosen, ids, canvas.ids[at])
        canvas.sums.index_add_(0, rows, torch.where(chosen, record_logps + entropies, 0.0).sum(1))
        batch.hidden[rows] = hidden = hidden.scatter(1, within, hidden.gather(1, within) & ~chosen)
        if editing:  # the step's one host sync: which rows take another step
            made = torch.stack([hidden.sum(1), edited.sum(1)], dim=1).tolist()
            later = [
                hides if settings.edits is None else row.edited(hides, edits, settings.post_steps)
                for row, settings, (hides, edits) in zip(progress, own_settings, made, strict=True)
            ]
        elif any(settings.rule is not None for settings in own_settings):
            later = hidden.sum(1).tolist()
        for row, count in zip(progress, later, strict=True):
            row.left, row.step = count, row.step + 1
        batch.stop(live)
        predicted, so_far = (ids, record_logps, entropies), (canvas.passes, canvas.forward_tokens)
        return Step(rows, numbers, positions, chosen, *predicted, canvas.ids, *so_far, self.settings.most_writes)

    def decide(
        self, batch: Batch, live: list[int], found: Tensor, still: Tensor, due: Tensor, left: Sequence[int]
    ) -> Sequence[Tensor]:
        """What `predict` gives (n, k), from the states `found`, and which of the predictions at hidden positions
        (`still`) are kept (n, k)."""
        alike: dict[SamplingSettings, list[int]] = {}  # rows with the same settings: all, except in a stream
        for index, row in enumerate(live):
            alike.setdefault(batch.rows[row].settings or self.settings, []).append(index)
        parts = []
        for settings, some in alike.items():
            those: Any = batch.upload(some) if len(alike) > 1 else slice(None)
            counts, own = [left[index] for index in some], batch.generators([live[index] for index in some])
            drawn = (settings, self.mask_token_id, own, self.noise_dtype)
            guessed = predict(self.model, found[:, those], counts, *drawn)
            kept = keep(settings, guessed[1], guessed[2], still[those], due[those], counts, own)
            parts.append((*guessed, kept))
        if len(parts) == 1:
            return parts[0]
        order = batch.upload([*chain(*alike.values())]).argsort()
        return [torch.cat(part)[order] for part in zip(*parts, strict=True)]

    def states(self, canvas: Canvas, passes: Passes, rows: Tensor, positions: Tensor) -> Tensor:
        """Hidden states (branches, n, k, hidden) at `positions` (n, k) of `rows`; guidance has two branches."""
        branches = [canvas.ids[rows]]
        if passes.branches == 2:
            branches.append(branches[0].masked_fill(canvas.given[rows], self.mask_token_id))
        visible = canvas.visible[rows].repeat(len(branches), 1)
        states, fed = passes.states(torch.cat(branches), visible, positions.repeat(len(branches), 1))
        canvas.passes[rows] += 1
        canvas.forward_tokens[rows] += fed.unflatten(0, (len(branches), -1)).sum(0)
        return states.unflatten(0, (len(branches), -1))

    def fill_blocks(self, batch: Batch, live: list[int], passes: Passes, together: bool) -> Iterator[Step]:
        """Yield steps of the rows `live` until all of them (or, if not `together`, one) have filled their blocks."""
        while True:
            yield self.step(batch, live, passes)
            working = [i for i, row in enumerate(live) if batch.rows[row].left]
            if not working or (not together and len(working) < len(live)):
                return
            if len(working) < len(live):
                passes.keep(passes.in_branches(working, len(live)))
                live = [live[i] for i in working]

    @torch.no_grad()
    def fill_canvas(self, batch: Batch, rows: list[int], passes: Passes, ends: Sequence[int] = ()) -> Iterator[Step]:
        """Fill these rows of a batch block after block; a row leaves when its finished blocks hold one of `ends`."""
        live, kept = rows, list[int]()
        while live:
            passes.enter(batch.open_blocks(live), kept)
            yield from self.fill_blocks(batch, live, passes, together=True)
            done = batch.finished(live, ends)
            batch.leave_columns(live, done, passes)
            kept = [index for index, row in enumerate(live) if row not in done]
            live = [live[index] for index in kept]

    def checked(self, steps: Iterator[Step], canvas: Canvas) -> Iterator[Step]:
        """The `steps` that fill a canvas, and then NotFiniteError if a row's log-probs or entropies are not finite."""
        yield from steps
        finite = canvas.sums.isfinite().tolist()  # the rollout's one host sync at its end
        if not all(finite):
            raise self.fault(canvas, finite.index(False), finite.index(False))

    def fault(self, canvas: Canvas, row: int, number: int) -> NotFiniteError:
        """The error for a row of the canvas, called `number`. It names the layer, for which the row's first and last
        states and the unconditional one of guidance are run again."""
        seen = canvas.visible[row].bool()
        ids, given = canvas.ids[row][seen], canvas.given[row][seen]
        hidden = torch.full_like(ids, self.mask_token_id)
        return NotFiniteError(number, why_not_finite(self.model, [ids.where(given, hidden), ids, hidden]))


# --- Rollouts: what sampling returns, and the functions that sample ---------------------------------------------------


def rollout(
    model: Any, prompt_ids: Tensor, attention_mask: Tensor, settings: SamplingSettings | None = None, **options: Any
) -> Rollout:
    """Sample a completion for each prompt.

    Args:
        model: from `d1.models.load_model`, in eval mode.
        prompt_ids: (rows, prompt) ids, padded on the left.
        attention_mask: (rows, prompt), 1 at real tokens. In fp32 a greedy row is the same in any batch.
        settings: how to sample; instead, give its fields: `gen_length=..., block_length=..., steps=...`.
        options: keyword arguments of `rollout_steps`; `mask_token_id` is required.

    Raises:
        ValueError: the model is not prepared, or an argument is wrong; raised before the first forward pass.
        NotFiniteError: a row's log-probs or entropies are not finite; raised after the last pass. Names row and layer.
    """
    return rollout_of(rollout_steps(model, prompt_ids, attention_mask, settings, **options), prompt_ids.shape[1])


def generate(model: Any, prompt_ids: Tensor, attention_mask: Tensor, *args: Any, **options: Any) -> Tensor:
    """The ids (rows, prompt + gen_length) that `rollout` samples with the same arguments."""
    return rollout(model, prompt_ids, attention_mask, *args, **options).ids


def rollout_steps(
    model: Any,
    prompt_ids: Tensor,
    attention_mask: Tensor,
    settings: SamplingSettings | None = None,
    *,
    mask_token_id: Any,
    generator: Generators = None,
    noise_dtype: torch.dtype = torch.float32,
    eos_token_ids: Sequence[int] | None = None,
    stops: Stops | None = None,
    columns: Sequence[Columns | None] | None = None,
    other_blocks: bool = False,
    recompute: bool = False,
    **fields: Any,
) -> Iterator[Step]:
    """`rollout`, as an iterator of one `Step` per forward pass. After the last step the canvas is whole.

    A block-causal model completes the rows group by group: in a group, all prompts end at the same position of a block.

    Args:
        mask_token_id: None for a model with uniform noise.
        generator: one for the batch, or one per row, which makes a row's draws independent of its batch.
        noise_dtype: data type of the Gumbel noise, float32 or float64.
        eos_token_ids: the EOS stop: a row whose finished blocks hold one of these ids leaves the batch, and its later
            blocks are filled with the first id. With a causal context, a row's block already ends once nothing before
            its EOS is hidden. No token up to a row's first EOS changes. Random draws then need one generator per row,
            as with a parallel sampler.
        stops: with the EOS stop, another end: it is asked about the finished blocks of a row, on the host.
        columns: of each row, those of an earlier text that begins its prompt: an exact cache takes them, and leaves its
            own instead when the row ends.
        other_blocks: let a block-causal model fill blocks of another length than its own. Its cache stays exact.
        recompute: let a block-causal model compute everything in each step, as a reference for its cache.

    Raises:
        ValueError: as `rollout`; raised at the call, not at the first step.
        NotFiniteError: as `rollout`.
    """
    require_prepared(model)
    prompt_ids = token_ids(prompt_ids)
    if settings is None:
        settings = SamplingSettings(**fields)
    elif fields:
        raise ValueError(f"sampling got both settings and {', '.join(fields)}: put all of them into the settings")
    settings = settings.suited(model.config)
    check_generator(settings, generator, len(prompt_ids), eos_token_ids)
    check_sampler(settings, model.config, other_blocks)
    steps_of_all = other_sampler(model.config, settings)
    if steps_of_all is not None:
        generators = generator if isinstance(generator, Sequence) else []
        return steps_of_all(model, prompt_ids, attention_mask, settings, generators, eos_token_ids or (), mask_token_id)
    masked = not bool(attention_mask.all())
    sampler = Sampler(model, settings, mask_token_id, noise_dtype)
    canvas = start_canvas(prompt_ids, attention_mask, settings.gen_length, mask_token_id)
    inside: list[int | None] = []
    rows: list[Row] = []
    lengths = prompt_lengths(model.config, attention_mask)
    for number, (length, held) in enumerate(zip(lengths, columns or [None] * len(lengths), strict=True)):
        after = tokens_inside(model.config, length, settings.block_length)
        inside.append(after)
        schedule = settings.schedule(None if after is None else after % settings.block_length)
        own: dict[str, Any] = {"stops": stops, "ends": tuple(eos_token_ids or ()), "first_token": settings.first_token}
        prompt = canvas.start if held is None or length is None else length
        rows.append(Row(number, prompt, after or 0, schedule, columns=held, **own))
    batch = Batch.of(rows, canvas, generator)
    cache = cache_of(model.config, settings.cache, recompute)

    # Rows whose prompts end at the same position of a block: their blocks, and so their passes, are aligned.
    def complete(after: int | None) -> Iterator[Step]:
        passes = sampler.passes(cache, device=canvas.ids.device, masked=masked, aligned=True)
        live = [row for row, other in enumerate(inside) if other == after]
        return sampler.fill_canvas(batch, live, passes, eos_token_ids or ())

    steps = chain.from_iterable(map(complete, sorted({*inside}, key=lambda after: after or 0)))
    return sampler.checked(steps, canvas)


def check_generator(
    settings: SamplingSettings, generator: Generators, rows: int, eos_token_ids: Sequence[int] | None
) -> None:
    if isinstance(generator, Sequence):
        if len(generator) != rows:
            raise ValueError(f"sampling needs one generator per row, got {len(generator)} for {rows} rows")
    elif settings.draws and (eos_token_ids is not None or settings.rule is not None or settings.sampler == "scdd"):
        raise ValueError("random draws with eos_token_ids or a parallel sampler need a list of generators, one per row")
