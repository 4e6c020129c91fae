"""The reverse process: prompt -> completion, block by block (LLaDA, arXiv 2502.09992, section 2.4 and appendix B).

A canvas of `gen_length` mask tokens follows the prompt. Blocks are filled from left to right; in each step the model
(`passes.py`, `caches.py`) predicts every masked token of the current block (`predict.py`), and some of the predictions
are kept (`reveal.py`).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import compress
from typing import Any, NamedTuple

import torch
from torch import Generator, Tensor

from d1.models.head import NotFiniteError, why_not_finite
from d1.sampling.caches import Cache
from d1.sampling.passes import Block, KVCacheRows, Passes
from d1.sampling.predict import Generators, predict, uniform
from d1.sampling.record import Canvas, Step
from d1.sampling.reveal import REMASKING, RULES
from d1.sampling.settings import SamplingSettings

Stops = Callable[[Sequence[int]], bool]  # whether a completion that begins with these ids ends with them

# --- The progress of each row, and the EOS stop, which decides which rows leave ---------------------------------------


def eos_cut(completion_ids: Tensor, eos_token_ids: Sequence[int] | Tensor, including: bool = True) -> Tensor:
    """(rows, tokens) bool: true before each row's first EOS and, if `including`, at it; all true without an EOS."""
    is_eos = torch.isin(completion_ids, torch.as_tensor(eos_token_ids, device=completion_ids.device))
    return is_eos.cumsum(-1) - is_eos.long() * including == 0


@dataclass
class Row:
    """The progress of one row."""

    number: int  # the number of its prompt in the batch or the stream
    prompt: int  # positions before the completion that a pass processes: the prompt's tokens, with or without padding
    prompt_in_block: int  # of these, those from a start of a block of a block-causal model to the completion
    schedule: list[list[int]]  # tokens revealed in each step of each block
    generator: Generator | None = None  # its own; None if it draws nothing or draws from the generator of the batch
    block: int = -1  # current block and step, from 0
    step: int = 0
    filled: int = 0  # tokens of the completion before the block
    remaining: int = 0  # tokens that the next pass predicts: those the block hides, or with editing all; 0: it is done
    hidden_count: int = 0  # with editing, tokens that the block still hides
    post_passes: int = 0  # with editing, passes since it hid none
    stops: Stops | None = None  # another end of the completion than an EOS, for the EOS stop
    cache_rows: KVCacheRows | None = None  # of its text's first tokens; `prompt` is then without padding
    # Tokens of each block, if some are there before the first pass; None: the schedule reveals all of them
    lengths: list[int] | None = None
    # In a stream whose rows differ:
    settings: SamplingSettings | None = None  # what its tokens are drawn by; None: what the sampler's are
    eos_token_ids: tuple[int, ...] = ()  # ids that end its completion, for the EOS stop
    first_token: str | None = None  # of the settings; not None: the model has a causal context
    max_writes: int = 1  # of the settings
    offset: int = 0  # by how much the batch's longest completion is longer: this row's prompt ends that much later

    @property
    def length(self) -> int:
        """Tokens of the completion."""
        return sum(map(sum, self.schedule))

    def shift(self, tokens: int) -> None:
        """Continues in a batch whose longest completion is longer by `tokens` than before."""
        self.offset, self.filled = self.offset + tokens, self.filled + tokens
        self.prompt, self.prompt_in_block = self.prompt - tokens, self.prompt_in_block - tokens

    @property
    def size(self) -> int:
        """Tokens of the block."""
        if self.lengths is not None:
            return self.lengths[self.block]
        return sum(self.schedule[self.block])

    @property
    def scheduled_later(self) -> int:
        """How many tokens of the block the schedule leaves to the steps after the next."""
        return sum(self.schedule[self.block][self.step + 1 :])

    @property
    def is_complete(self) -> bool:
        return self.remaining == 0 and self.block == len(self.schedule) - 1

    def open_block(self) -> None:
        """Begin the next block that hides something."""
        self.remaining = 0
        while self.remaining == 0:
            if self.block >= 0:
                self.filled += self.size
            self.block += 1
            self.step = self.post_passes = 0
            self.remaining = self.hidden_count = sum(self.schedule[self.block])


@dataclass
class Batch:
    """The rows at work and their canvas; rows without a generator of their own draw from that of the batch."""

    rows: list[Row]
    canvas: Canvas
    hidden: Tensor  # (rows, longest block) bool, what is still hidden in each row's current block
    generator: Generator | None = None
    unfilled: Tensor | None = None  # (rows, positions to fill) bool, what was hidden before the first pass; None: all

    @classmethod
    def create(
        cls, rows: list[Row], canvas: Canvas, generator: Generators = None, unfilled: Tensor | None = None
    ) -> Batch:
        """A batch of new rows; if `generator` is a list, each row gets its own from it."""
        if isinstance(generator, Sequence):
            for row, row_generator in zip(rows, generator, strict=True):
                row.generator = row_generator
            generator = None
        longest = 0
        for row in rows:
            for size in row.lengths or map(sum, row.schedule):
                longest = max(longest, size)
        hidden = torch.zeros(len(rows), longest, dtype=torch.bool, device=canvas.ids.device)
        return cls(rows=rows, canvas=canvas, hidden=hidden, generator=generator, unfilled=unfilled)

    def upload(self, numbers: Any) -> Tensor:
        """Copy whole numbers to the device, without waiting for it."""
        return torch.tensor(numbers, dtype=torch.long).to(self.hidden.device, non_blocking=True)

    def generators(self, rows: list[int]) -> Generators:
        """The generators of these rows, or that of the batch if they have none."""
        generators = []
        for row in rows:
            generator = self.rows[row].generator
            if generator is None:
                return self.generator
            generators.append(generator)
        return generators

    def open_blocks(self, active: list[int]) -> list[Block]:
        """Begin the next block of each row of `active` whose block is full, and return all their blocks."""
        opened = [index for index in active if self.rows[index].remaining == 0]
        for index in opened:
            self.rows[index].open_block()

        # All tokens of a new block are hidden, except those that were there before the first pass.
        sizes = self.upload([self.rows[index].size for index in opened]).unsqueeze(1)
        in_block = torch.arange(self.hidden.shape[1], device=sizes.device)
        hidden = in_block < sizes
        if self.unfilled is not None:
            filled = self.upload([self.rows[index].filled for index in opened]).unsqueeze(1)
            positions = (filled + in_block) % self.unfilled.shape[1]
            hidden = hidden & self.unfilled[self.upload(opened).unsqueeze(1), positions]
        self.hidden[self.upload(opened)] = hidden

        # Where the blocks lie in the text.
        start = self.canvas.start
        blocks = []
        for index in active:
            row = self.rows[index]
            block = Block(
                start=start + row.filled,
                end=start + row.filled + row.size,
                origin=start - row.prompt,
                boundary=start - row.prompt_in_block,
                causal=row.first_token == "causal",
                cache_rows=row.cache_rows,
            )
            blocks.append(block)
        return blocks

    def finish_rows(self, active: list[int], eos_token_ids: Sequence[int]) -> list[int]:
        """The rows of `active` that are complete or ended by the EOS stop, which fills the later blocks of a row."""
        complete, between_blocks = list[int](), list[int]()
        for index in active:
            if self.rows[index].is_complete:
                complete.append(index)
            elif self.rows[index].remaining == 0:
                between_blocks.append(index)
        if not eos_token_ids or not between_blocks:
            return complete

        # Rows between two blocks: an EOS in what they have filled ends them.
        rows, stop_token_ids = self.upload(between_blocks), self.upload(eos_token_ids)
        waiting = [self.rows[index] for index in between_blocks]
        filled = self.upload([row.filled + row.size for row in waiting]).unsqueeze(1)
        firsts = self.upload([row.offset for row in waiting]).unsqueeze(1)
        all_completions = self.canvas.ids[:, self.canvas.start :]
        completions = all_completions[rows]
        positions = torch.arange(completions.shape[1], device=completions.device)
        hidden = positions >= filled
        ended = (torch.isin(completions, stop_token_ids) & ~hidden & (positions >= firsts)).any(1)

        # So does a stop of the row itself, which is asked on the host.
        if any(row.stops for row in waiting):
            stopped = []
            for ids, row in zip(completions.tolist(), waiting, strict=True):
                stopped.append(bool(row.stops and row.stops(ids[row.offset : row.filled + row.size])))
            ended = ended | torch.tensor(stopped).to(ended.device, non_blocking=True)

        # Fill their later blocks.
        all_completions[rows] = completions.masked_fill(ended.unsqueeze(1) & hidden, eos_token_ids[0])
        has_ended = ended.tolist()  # the block's one host sync
        return sorted(complete + list(compress(between_blocks, has_ended)))

    def evict_rows(self, active: list[int], done: Sequence[int], passes: Passes) -> None:
        """Store the keys and values of the rows `done`, out of those of `active`, which began the last block."""
        for number, index in enumerate(active):
            cache_rows = self.rows[index].cache_rows
            if index in done and cache_rows is not None and cache_rows.wanted:
                passes.evict(number, cache_rows)


# --- Steps: fill mask tokens block after block, with one forward pass per step ----------------------------------------


def select_confident(
    settings: SamplingSettings,
    logps: Tensor,
    entropies: Tensor,
    hidden: Tensor,
    due: Tensor,
    counts: Sequence[int],
    generator: Generators,
) -> Tensor:
    """(n, k) bool, which predictions at `hidden` positions are kept: `due` (n,) by the schedule, or more by the rule.
    `counts`: how many positions of each row draw random numbers."""
    # The rank of each prediction, 0 for the one to keep first.
    draw = partial(uniform, logps.shape, generator, logps, counts)
    scores = REMASKING[settings.remasking].scores(logps, entropies, draw).masked_fill(~hidden, -math.inf)
    order = scores.argsort(dim=-1, descending=True, stable=True)  # ties, such as confidences of 1: left first
    ranks = order.argsort(dim=-1)

    # A rule counts how many of the best to reveal.
    if settings.rule is not None:
        count = RULES[settings.rule].count(scores.gather(1, order), entropies.gather(1, order), settings.level)
        due = count.maximum(due).minimum(hidden.sum(1))
    return ranks < due.unsqueeze(1)


class Targets(NamedTuple):
    """Where a step predicts: tensors are (n, k).

    Attributes:
        rows: (n,) numbers in the batch.
        positions: in the text, prompt included.
        is_target: bool, false for the padding of a row with fewer positions than another one.
        hidden: bool, whether the position still hides its token.
        counts: how many positions each row needs.
    """

    rows: Tensor
    positions: Tensor
    is_target: Tensor
    hidden: Tensor
    counts: Sequence[int]


class Choice(NamedTuple):
    """The tokens of a step, (n, k) each.

    Attributes:
        ids, logps, entropies, record_logps: as `predict` gives them.
        chosen: bool, the tokens that are written.
        edited: bool, of these, those that replace a revealed token; None: without edits.
    """

    ids: Tensor
    logps: Tensor
    entropies: Tensor
    record_logps: Tensor
    chosen: Tensor
    edited: Tensor | None = None


@dataclass(frozen=True)
class Sampler:
    """How a model fills a canvas, step by step: mask -> predict -> choose -> write.

    Other steps are subclasses: for a causal context (`causal.py`), with edits (`edits.py`), and of rows with settings
    of their own (`stream.py`). A model with uniform noise has no mask tokens, and a loop of its own (`uniform.py`);
    so has the sampler scdd (`scdd.py`).
    """

    model: Any
    settings: SamplingSettings
    mask_token_id: int
    noise_dtype: torch.dtype

    def passes(self, cache: Cache, *, device: Any, needs_attention_mask: bool, aligned: bool) -> Passes:
        return cache.passes(
            self.model,
            branches=2 if self.settings.cfg_scale else 1,
            mask_token_id=self.mask_token_id,
            device=device,
            needs_attention_mask=needs_attention_mask,
            aligned=aligned,
        )

    def settings_of(self, row: Row) -> SamplingSettings:
        """How the tokens of a row are drawn."""
        return self.settings

    def step(self, batch: Batch, active: list[int], passes: Passes) -> Step:
        """Run one forward pass of the n rows `active`; each row reveals tokens of its block. Tensors are (n, k), with k
        the most positions that a row predicts."""
        canvas = batch.canvas
        progress = [batch.rows[row] for row in active]
        rows, filled, later = batch.upload(
            [active, [row.filled for row in progress], [row.scheduled_later for row in progress]]
        )
        hidden = batch.hidden[rows]  # (n, block)

        # Mask: the hidden positions of its block that each row predicts, ascending. A row with fewer of them than
        # another one is padded with other positions, each a different one.
        predicted, counts = self.positions_to_predict(batch, progress, hidden)
        in_block = predicted.logical_not().byte().argsort(dim=1, stable=True)[:, : max(counts)]
        indices = (filled.unsqueeze(1) + in_block) % canvas.fill_positions.shape[1]
        positions = canvas.fill_positions[rows.unsqueeze(1), indices]
        is_target = predicted.gather(1, in_block)
        targets = Targets(
            rows=rows,
            positions=positions,
            is_target=is_target,
            hidden=is_target & hidden.gather(1, in_block),
            counts=counts,
        )

        # Predict: the hidden states there, from one forward pass.
        numbers = canvas.passes[rows]
        states = self.states(canvas, passes, rows, positions)

        # Choose: of the tokens that are drawn from them, as many as the schedule says, or more by a rule.
        due = (targets.hidden.sum(1) - later).clamp(min=1)
        choice = self.choose(batch, active, targets, states, due)

        # Write the chosen tokens.
        ids, chosen = choice.ids, choice.chosen
        at = (rows.unsqueeze(1), positions)
        canvas.ids[at] = torch.where(chosen, ids, canvas.ids[at])
        canvas.sums.index_add_(0, rows, torch.where(chosen, choice.record_logps + choice.entropies, 0.0).sum(1))
        hidden = hidden.scatter(1, in_block, hidden.gather(1, in_block) & ~chosen)
        batch.hidden[rows] = hidden

        # Advance: what each row has left to predict.
        self.advance(batch, active, hidden, choice)
        return Step(
            rows=rows,
            numbers=numbers,
            positions=positions,
            revealed=chosen,
            ids=ids,
            logps=choice.record_logps,
            entropies=choice.entropies,
            canvas=canvas.ids,
            passes=canvas.passes,
            forward_tokens=canvas.forward_tokens,
            max_writes=self.settings.max_writes,
        )

    def positions_to_predict(
        self, batch: Batch, progress: Sequence[Row], hidden: Tensor
    ) -> tuple[Tensor, Sequence[int]]:
        """(n, block) bool, the positions of its block that each row predicts, and how many they are at most: those
        that are `hidden`."""
        return hidden, [row.remaining for row in progress]

    def advance(self, batch: Batch, active: list[int], hidden: Tensor, choice: Choice) -> None:
        """Set how many tokens the next pass of each row predicts. The schedule says it without waiting for the device,
        unless a rule decides."""
        progress = [batch.rows[row] for row in active]
        counts = [row.scheduled_later for row in progress]
        if any(self.settings_of(row).rule is not None for row in progress):
            counts = hidden.sum(1).tolist()
        for row, count in zip(progress, counts, strict=True):
            row.remaining, row.step = count, row.step + 1

    def choose(self, batch: Batch, active: list[int], targets: Targets, states: Tensor, due: Tensor) -> Choice:
        """A token for each target, from the `states`, and which of them are written: of each row at least `due` (n,) of
        those at hidden positions."""
        return self.choose_with_settings(self.settings, targets, states, due, batch.generators(active))

    def choose_with_settings(
        self, settings: SamplingSettings, targets: Targets, states: Tensor, due: Tensor, generators: Generators
    ) -> Choice:
        """`choose` of rows with the same settings."""
        ids, logps, entropies, record_logps = predict(
            self.model, states, targets.counts, settings, self.mask_token_id, generators, self.noise_dtype
        )
        chosen = select_confident(settings, logps, entropies, targets.hidden, due, targets.counts, generators)
        return Choice(ids=ids, logps=logps, entropies=entropies, record_logps=record_logps, chosen=chosen)

    def states(self, canvas: Canvas, passes: Passes, rows: Tensor, positions: Tensor) -> Tensor:
        """Hidden states (branches, n, k, hidden) at `positions` (n, k) of `rows`; guidance has two branches."""
        branches = passes.branches
        ids = canvas.ids[rows]
        if branches == 2:
            unconditional = ids.masked_fill(canvas.context_mask[rows], self.mask_token_id)
            ids = torch.cat([ids, unconditional])
        visible, positions = canvas.visible[rows].repeat(branches, 1), positions.repeat(branches, 1)
        states, computed = passes.states(ids, visible, positions)  # (branches x n, k, hidden), (branches x n,)
        canvas.passes[rows] += 1
        canvas.forward_tokens[rows] += computed.unflatten(0, (branches, -1)).sum(0)
        return states.unflatten(0, (branches, -1))

    def fill_blocks(self, batch: Batch, active: list[int], passes: Passes, together: bool) -> Iterator[Step]:
        """Yield steps of the rows `active` until all of them (or, if not `together`, one) have filled their blocks."""
        while True:
            yield self.step(batch, active, passes)
            working = [i for i, row in enumerate(active) if batch.rows[row].remaining]
            if not working or (not together and len(working) < len(active)):
                return
            if len(working) < len(active):
                passes.gather_cache_rows(passes.in_branches(working, len(active)))
                active = [active[i] for i in working]

    @torch.no_grad()
    def unmask_rows(
        self, batch: Batch, rows: list[int], passes: Passes, eos_token_ids: Sequence[int] = ()
    ) -> Iterator[Step]:
        """Fill these rows of a batch block after block; a row leaves when its finished blocks hold one of
        `eos_token_ids`."""
        active, kept = rows, list[int]()
        # An EOS may be in blocks that were full at the start.
        if eos_token_ids and any(batch.rows[row].block >= 0 for row in active):
            done = batch.finish_rows(active, eos_token_ids)
            active = [row for row in active if row not in done]
        while active:
            passes.begin_blocks(batch.open_blocks(active), kept)
            yield from self.fill_blocks(batch, active, passes, together=True)
            done = batch.finish_rows(active, eos_token_ids)
            batch.evict_rows(active, done, passes)
            kept = [index for index, row in enumerate(active) if row not in done]
            active = [active[index] for index in kept]

    def check_finite(self, steps: Iterator[Step], canvas: Canvas) -> Iterator[Step]:
        """The `steps` that fill a canvas, and then NotFiniteError if a row's log-probs or entropies are not finite."""
        yield from steps
        finite = canvas.sums.isfinite().tolist()  # the rollout's one host sync at its end
        if not all(finite):
            raise self.nonfinite_error(canvas, finite.index(False), finite.index(False))

    def nonfinite_error(self, canvas: Canvas, row: int, number: int) -> NotFiniteError:
        """The error for a row of the canvas, called `number`. It names the layer, for which the row's first and last
        states and the unconditional one of guidance are run again."""
        seen = canvas.visible[row].bool()
        ids, is_context = canvas.ids[row][seen], canvas.context_mask[row][seen]
        hidden = torch.full_like(ids, self.mask_token_id)
        return NotFiniteError(number, why_not_finite(self.model, [ids.where(is_context, hidden), ids, hidden]))
