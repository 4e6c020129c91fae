"""Sampling from a stream of prompts: the next prompt follows a finished row, so the batch stays full."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import count, islice
from typing import Any

import torch
from torch import Generator, Tensor
from torch.nn.functional import pad

from d1.models.attention import require_prepared
from d1.models.head import NotFiniteError
from d1.models.kinds import block_size
from d1.sampling.caches import cache_of
from d1.sampling.causal import CausalSampler
from d1.sampling.edits import EditingSampler
from d1.sampling.loop import Batch, Choice, Row, Sampler, Stops, Targets
from d1.sampling.other_samplers import other_sampler, stream_in_batches
from d1.sampling.passes import KVCacheRows
from d1.sampling.record import Canvas, Rollout, Step, empty_record, record_step, start_canvas
from d1.sampling.settings import SamplingSettings, check_mask_token_id, check_sampler

# Ids without padding, the row's generator where sampling draws, and perhaps `stops` and its cache rows as in `rollout`
Prompt = (
    tuple[Sequence[int], Generator | None]
    | tuple[Sequence[int], Generator | None, Stops | None]
    | tuple[Sequence[int], Generator | None, Stops | None, KVCacheRows | None]
)
Finished = tuple[list[int], Rollout]


def rollout_stream(
    model: Any,
    prompts: Iterable[Prompt],
    settings: SamplingSettings,
    *,
    batch_size: int,
    mask_token_id: Any,
    noise_dtype: torch.dtype = torch.float32,
    eos_token_ids: Sequence[int] | None = None,
) -> Iterator[Finished]:
    """Sample a completion for each prompt, at most `batch_size` of them at a time.

    A row leaves when its last block is filled or, with the EOS stop, when the block with its first EOS is filled. Only
    then is the next prompt taken from `prompts`, so that several processes can share one queue. With a cache, all rows
    begin their blocks together; with uniform noise or the sampler scdd, they also leave together. Rows equal those of
    `rollout` with one generator per row: in fp32 they depend neither on the batch nor on the order of the prompts.

    Args:
        prompts: (ids, generator) each; the generator may be None if sampling draws nothing. For the least padding, sort
            prompts by length, the longest first. An iterator that has ended may have more when a row has been yielded.
        eos_token_ids: the EOS stop, as in `rollout`.

    Yields:
        (numbers, rollout): for the rows that ended in one step, the numbers of their prompts in the stream, and their
        `Rollout`, whose ids are padded on the left with mask tokens.

    Raises:
        ValueError: at the call, if the model is not prepared or an argument is wrong; later, if a generator is missing.
        NotFiniteError: as `rollout`, for a row that ended; its `number` is that of the prompt.
    """
    require_prepared(model)
    settings = settings.for_model(model.config)
    check_sampler(settings, model.config)
    check_mask_token_id(mask_token_id, model.config)
    if batch_size < 1:
        raise ValueError(f"batch_size must be at least 1, got {batch_size}")
    stop_token_ids = tuple(eos_token_ids or ())
    steps_of_all = other_sampler(model.config, settings)
    if steps_of_all is not None:
        return stream_in_batches(steps_of_all, model, prompts, settings, batch_size, stop_token_ids, mask_token_id)
    stream = Stream(
        model,
        mask_token_id=mask_token_id,
        cache=settings.cache,
        guided=settings.cfg_scale > 0,
        noise_dtype=noise_dtype,
    )
    waiting, numbers = iter(prompts), count()

    def next_requests(room: int) -> Iterator[RowRequest]:
        """Of the next prompts, which are asked for again after they have ended once."""
        for ids, generator, *options in islice(waiting, room):
            yield RowRequest(next(numbers), ids, settings, generator, stop_token_ids, *options)

    def sample_all() -> Iterator[Finished]:
        while True:
            # Finished rows leave.
            finished = stream.pop_finished()
            if finished is not None:
                for error in stream.nonfinite_errors().values():
                    raise error
                yield finished

            # The next prompts take their places.
            room = batch_size - len(stream)
            stream.add_rows(list(next_requests(room)))
            if not len(stream):
                return
            for _ in stream.steps():
                pass

    return sample_all()  # a generator of its own, so that wrong arguments are refused at the call


@dataclass(frozen=True)
class RowRequest:
    """A row of a stream."""

    number: int  # which no other row at work has
    ids: Sequence[int]  # of the prompt
    settings: SamplingSettings
    generator: Generator | None = None  # None where nothing is drawn
    eos_token_ids: tuple[int, ...] = ()  # ids that end its completion, for the EOS stop
    stops: Stops | None = None
    cache_rows: KVCacheRows | None = None


class PerRowSampler(Sampler):
    """The steps of rows that each have settings of their own."""

    def settings_of(self, row: Row) -> SamplingSettings:
        assert row.settings is not None
        return row.settings

    def choose(self, batch: Batch, active: list[int], targets: Targets, states: Tensor, due: Tensor) -> Choice:
        # Rows with the same settings, by their numbers among the active ones
        groups: dict[SamplingSettings, list[int]] = {}
        for index, row in enumerate(active):
            groups.setdefault(self.settings_of(batch.rows[row]), []).append(index)
        if len(groups) == 1:
            (settings,) = groups
            return self.choose_with_settings(settings, targets, states, due, batch.generators(active))

        # Group after group
        choices, numbers = [], list[int]()
        for settings, indices in groups.items():
            rows = batch.upload(indices)
            group_targets = Targets(
                rows=targets.rows[rows],
                positions=targets.positions[rows],
                is_target=targets.is_target[rows],
                hidden=targets.hidden[rows],
                counts=[targets.counts[index] for index in indices],
            )
            generators = batch.generators([active[index] for index in indices])
            choice = self.choose_with_settings(settings, group_targets, states[:, rows], due[rows], generators)
            choices.append(choice)
            numbers += indices

        # In the order of the active rows again
        order = batch.upload(numbers).argsort()
        return Choice(
            ids=torch.cat([choice.ids for choice in choices])[order],
            logps=torch.cat([choice.logps for choice in choices])[order],
            entropies=torch.cat([choice.entropies for choice in choices])[order],
            record_logps=torch.cat([choice.record_logps for choice in choices])[order],
            chosen=torch.cat([choice.chosen for choice in choices])[order],
        )


class PerRowCausalSampler(CausalSampler, PerRowSampler):
    """`CausalSampler` for rows with settings of their own."""


class PerRowEditingSampler(EditingSampler, PerRowSampler):
    """`EditingSampler` for rows with settings of their own, some of which edit."""


def make_row_sampler(rows: Sequence[Row], sampler: Sampler) -> Sampler:
    """A sampler of the same model, with the steps that these rows need together."""
    kind: type[Sampler] = PerRowSampler
    if any(row.first_token is not None for row in rows):
        kind = PerRowCausalSampler
    elif any(row.settings is not None and row.settings.edits is not None for row in rows):
        kind = PerRowEditingSampler
    return kind(sampler.model, sampler.settings, sampler.mask_token_id, sampler.noise_dtype)


class Stream:
    """Rows at work together, which may differ in length and in all settings but the cache and the use of guidance.
    `pop_finished`, `add_rows` and `steps` are called in turn.

    Args:
        prompt_width: the least width of the prompts, with their padding.
        alone: all rows begin together, with one length and, in a block-causal model, prompts that end at the same
            position of a block. Passes are then those of `rollout` for this batch, to the bit.
    """

    def __init__(
        self,
        model: Any,
        *,
        mask_token_id: int,
        cache: str | None,
        guided: bool,
        noise_dtype: torch.dtype = torch.float32,
        prompt_width: int = 0,
        alone: bool = False,
    ) -> None:
        self.prompt_width, self.alone, self.has_padding = prompt_width, alone, False
        self.cache = cache_of(model.config, cache)
        if alone:
            self.cache = replace(self.cache, together=True)
        self.passes = self.cache.passes(
            model,
            branches=2 if guided else 1,
            mask_token_id=mask_token_id,
            device=model.device,
            needs_attention_mask=not alone,
            aligned=alone,
        )
        self.sampler: Sampler = PerRowSampler(model, SamplingSettings(1, 1, 1), mask_token_id, noise_dtype)
        no_rows = torch.zeros(0, 0, dtype=torch.long, device=model.device)
        self.batch = Batch.create([], start_canvas(no_rows, no_rows, 0, 0))
        self.record = empty_record(0, 0, model.device)
        self.kept: list[int] = []  # which of the batch's rows stay
        self.done: list[int] = []  # which of them were taken last
        self.count = 0  # rows at work

    def __len__(self) -> int:
        return self.count

    @property
    def rows(self) -> list[Row]:
        return self.batch.rows  # in the order of `Step.rows`' numbers

    @torch.no_grad()
    def pop_finished(self, dropped: Collection[int] = ()) -> Finished | None:
        """The rows that ended, each with its completion last; those with the numbers `dropped` leave, too."""
        # Here each row has a full block, or is new, or (only without a cache) is in the middle of its block.
        batch, canvas = self.batch, self.batch.canvas

        # Which rows ended: one call for all rows with the same EOS stop.
        groups: dict[tuple[int, ...], list[int]] = {}
        for index, row in enumerate(batch.rows):
            groups.setdefault(row.eos_token_ids, []).append(index)
        done: list[int] = []
        for end_ids, indices in groups.items():
            done += batch.finish_rows(indices, end_ids)
        done.sort()
        batch.evict_rows(list(range(len(batch.rows))), done, self.passes)

        # Which rows stay.
        self.kept = []
        for index, row in enumerate(batch.rows):
            if index not in done and row.number not in dropped:
                self.kept.append(index)
        self.count = len(self.kept)
        if not done:
            return None

        self.done, rows = done, batch.upload(done)
        completed = Rollout.from_record(
            canvas.ids[rows], self.record[:, rows], canvas.passes[rows], canvas.forward_tokens[rows]
        )
        return [batch.rows[index].number for index in done], completed

    def nonfinite_errors(self) -> dict[int, NotFiniteError]:
        """By number, the errors of rows of the last `pop_finished` whose values are not finite."""
        canvas, errors = self.batch.canvas, dict[int, NotFiniteError]()
        finite = canvas.sums[self.batch.upload(self.done)].isfinite().tolist()
        for index, is_finite in zip(self.done, finite, strict=True):
            if not is_finite:
                number = self.batch.rows[index].number
                errors[number] = self.sampler.nonfinite_error(canvas, index, number)
        return errors

    @torch.no_grad()
    def add_rows(self, new: Sequence[RowRequest]) -> None:
        """Adds rows to those that stay."""
        if not new and len(self.kept) == len(self.batch.rows):
            return
        device = self.record.device
        rows = [self.batch.rows[row] for row in self.kept]
        for request in new:
            row = self.new_row(request)
            rows.append(row)
            if len(request.ids) < row.prompt:
                self.has_padding = True
        self.sampler = make_row_sampler(rows, self.sampler)

        # Completions end together on the right: the batch is as wide as its longest prompt and its longest completion.
        longest = max((row.length for row in rows), default=0)
        for row in rows:
            row.shift(longest - row.length - row.offset)
        width = max(self.prompt_width, *(row.prompt for row in rows), 0) + longest

        # The canvas: the rows that stay, padded or cut on the left, and then the new ones.
        old, stay = self.batch.canvas, self.batch.upload(self.kept)
        fresh = self.new_canvas(new, width, longest)
        wider = (width - old.ids.shape[1], 0)  # a negative number cuts positions off, which are all padding
        canvas = Canvas(
            ids=torch.cat([pad(old.ids[stay], wider, value=self.sampler.mask_token_id), fresh.ids]),
            visible=torch.cat([pad(old.visible[stay], wider), fresh.visible]),
            context_mask=torch.cat([pad(old.context_mask[stay], wider), fresh.context_mask]),
            fill_positions=torch.arange(width - longest, width, device=device).expand(len(rows), -1),
            passes=torch.cat([old.passes[stay], fresh.passes]),
            forward_tokens=torch.cat([old.forward_tokens[stay], fresh.forward_tokens]),
            sums=torch.cat([old.sums[stay], fresh.sums]),
        )
        batch = Batch.create(rows, canvas)
        wider_by = batch.hidden.shape[1] - self.batch.hidden.shape[1]
        batch.hidden = pad(self.batch.hidden[stay], (0, wider_by, 0, len(new)))

        # The record (4, rows, canvas, writes) keeps the ends of the rows that stay.
        length, writes = self.record.shape[2:]
        max_writes = max((row.max_writes for row in rows), default=1)
        common, common_writes = min(longest, length), min(max_writes, writes)
        record = empty_record(len(rows), longest, device, max_writes)
        kept_record = self.record[:, stay, length - common :, :common_writes]
        record[:, : len(self.kept), longest - common :, :common_writes] = kept_record
        self.batch, self.count, self.record = batch, len(rows), record

    def new_row(self, request: RowRequest) -> Row:
        """The row of a request: its schedule, and where in a block of a block-causal model its prompt ends. ValueError
        if it lacks what its settings need."""
        config = self.sampler.model.config
        settings = request.settings.for_model(config)
        if settings.draws and request.generator is None:
            number = request.number
            raise ValueError(f"prompt {number} of the stream has no generator, but its settings draw numbers")
        if settings.first_token is not None and not request.ids:
            raise ValueError(f"prompt {request.number} of the stream is empty: a causal context needs a token")

        filled = None  # of a model with blocks: prompt tokens in the block in which the prompt ends
        if block_size(config):
            filled = len(request.ids) % settings.block_length
        prompt_width = len(request.ids)
        if self.alone:
            prompt_width = max(self.prompt_width, prompt_width)
        return Row(
            number=request.number,
            prompt=prompt_width,
            prompt_in_block=len(request.ids),
            schedule=settings.schedule(filled),
            generator=request.generator,
            stops=request.stops,
            cache_rows=request.cache_rows,
            # Rows with other lengths but the same way to draw tokens are drawn together.
            settings=replace(settings, gen_length=1, block_length=1, steps=1),
            eos_token_ids=request.eos_token_ids,
            first_token=settings.first_token,
            max_writes=settings.max_writes,
        )

    def new_canvas(self, new: Sequence[RowRequest], width: int, longest: int) -> Canvas:
        """The canvas of new rows, padded on the left to `width`."""
        device = self.record.device
        ids = torch.full((len(new), width), self.sampler.mask_token_id)
        visible, context_mask = torch.zeros_like(ids), torch.zeros_like(ids, dtype=torch.bool)
        for index, request in enumerate(new):
            end = width - request.settings.gen_length
            start = end - len(request.ids)
            ids[index, start:end] = torch.as_tensor(request.ids)
            context_mask[index, start:end] = True
            visible[index, start:] = 1
        fill_positions = torch.arange(width - longest, width, device=device).expand(len(new), -1)
        return Canvas.create(ids.to(device), visible.to(device), context_mask.to(device), fill_positions)

    @torch.no_grad()
    def steps(self) -> Iterator[Step]:
        """Steps until all rows have filled their blocks. Without a cache: until one has, or the caller stops."""
        batch, active = self.batch, list(range(len(self.batch.rows)))
        if self.alone:
            self.passes.needs_attention_mask = self.passes.needs_attention_mask or self.has_padding
        else:
            shorter = any(row.prompt < batch.canvas.start for row in batch.rows)
            self.passes.needs_attention_mask = self.cache.together or shorter
        self.passes.begin_blocks(batch.open_blocks(active), self.kept)
        for step in self.sampler.fill_blocks(batch, active, self.passes, self.cache.together):
            record_step(self.record, step, batch.canvas.start)
            yield step
