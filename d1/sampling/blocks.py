"""The loop of the reverse process: fill mask tokens block after block, with one forward pass per step."""

from __future__ import annotations

import logging
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cache, partial
from itertools import chain
from math import lcm
from typing import Any

import torch
from torch import Tensor

from d1.models.attention import attention_of
from d1.models.head import NotFiniteError, why_not_finite
from d1.models.kinds import attention_name, block_size, is_encoder, windowed
from d1.sampling.caches import Cache
from d1.sampling.canvas import Batch, Canvas
from d1.sampling.passes import Passes
from d1.sampling.predict import Generators, predict, uniform
from d1.sampling.reveal import REMASKING, RULES, best_first
from d1.sampling.settings import SamplingSettings

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class Step:
    """What one forward pass did to the n rows that took part in it."""

    rows: Tensor  # (n,) which rows of the batch
    numbers: Tensor  # (n,) how many earlier passes each of these rows took part in
    positions: Tensor  # (n, k) masked columns of the canvas, left to right; short rows are padded with revealed ones.
    # With editing, all columns of the block.
    revealed: Tensor  # (n, k) bool, whether the pass wrote its prediction there: to a masked column or as an edit
    ids: Tensor  # (n, k) the predictions; log-probs and entropies are those of `Rollout`
    logps: Tensor  # (n, k)
    entropies: Tensor  # (n, k)
    canvas: Tensor  # (rows, length) ids after this pass; later passes change this tensor and the next two in place
    passes: Tensor  # (rows,) so far, as in `Rollout`
    forward_tokens: Tensor  # (rows,) so far, as in `Rollout`
    most_writes: int = 1  # `SamplingSettings.most_writes`


def check_sampler(settings: SamplingSettings, config: Any, other_blocks: bool = False) -> None:
    """Raise ValueError if the settings do not suit the kind of model."""
    kind, size = config.model_type, block_size(config)
    if settings.cache is not None:
        caches = attention_of(config).caches
        wrong = {
            f"{kind} is an encoder, which has no key-value cache in Transformers": is_encoder(config),
            f"{kind} with blocks of {size} tokens needs no cached sampler: the other samplers already cache its "
            "finished blocks, without any loss": size is not None,
            f"{kind} has layers with windowed attention, whose cache drops keys": windowed(config),
            f"the cache {settings.cache} is wrong for {attention_name(config)} attention, which allows "
            f"{', '.join(caches or ()) or 'none'}": caches is not None and settings.cache not in caches,
        }
        for what in (what for what, is_so in wrong.items() if is_so):
            raise ValueError(f"{what}: use the sampler exact or parallel")
    if not other_blocks and size not in (None, settings.block_length):
        raise ValueError(
            f"this {kind} has blocks of {size} tokens, so block_length must be {size}, not "
            f"{settings.block_length}; d1.sampling.rollout accepts other lengths with other_blocks=True"
        )


def tokens_inside(config: Any, attention_mask: Tensor, block_length: int) -> list[int | None]:
    """For each prompt of a block-causal model, the number of tokens from the last place where a block of the model and
    a block of `block_length` begin together; None for other models."""
    size = block_size(config)
    if size is None:
        return [None] * len(attention_mask)
    return (attention_mask.long().sum(1) % lcm(size, block_length)).tolist()


@cache
def warn_of_edits(name: str) -> None:
    logger.warning(
        "%s: nothing in its config says that it learnt to correct visible tokens: SFT with --edit_noise writes that "
        "(for an adapter, into learnt.json), and LLaDA2.1 learnt it, but its config does not say so. Edits by a "
        "model that was trained on masks alone spoil more than they correct",
        name,
    )


def check_learnt(config: Any, settings: SamplingSettings) -> None:
    """Warns once of edits by a model that does not say that it learnt them."""
    if settings.edits is not None and not getattr(config, "edit_noise", None):
        warn_of_edits(config.name_or_path)


def keep(
    settings: SamplingSettings,
    logps: Tensor,
    entropies: Tensor,
    hidden: Tensor,
    due: Tensor,
    left: Sequence[int],
    generator: Generators,
) -> Tensor:
    """Which predictions (n, k) of `hidden` places are kept: those `due` (n,) by the schedule, or more by the rule."""
    draw = partial(uniform, logps.shape, generator, logps, left)
    places, scores = best_first(REMASKING[settings.remasking].scores(logps, entropies, draw), hidden)
    if settings.rule is not None:
        count = RULES[settings.rule].count
        due = count(scores, entropies.gather(1, places), settings.level).maximum(due).minimum(hidden.sum(1))
    return places.argsort(dim=-1) < due.unsqueeze(1)


@dataclass(frozen=True)
class Sampler:
    """How a model fills a canvas: what all steps share."""

    model: Any
    settings: SamplingSettings
    mask_token_id: int
    noise_dtype: torch.dtype

    def __post_init__(self) -> None:
        check_learnt(self.model.config, self.settings)

    def passes(self, cache: Cache, **options: Any) -> Passes:
        branches = 2 if self.settings.cfg_scale else 1
        return cache.passes(self.model, branches=branches, mask_token_id=self.mask_token_id, **options)

    def step(self, batch: Batch, live: list[int], passes: Passes) -> Step:
        """Run one forward pass of the rows `live`; each row reveals tokens of its block."""
        canvas, states = batch.canvas, [batch.rows[row] for row in live]
        left, later = [state.left for state in states], [state.later for state in states]
        rows, filled, kept = batch.upload([live, [state.filled for state in states], later])
        hidden = asked = batch.hidden[rows]
        own_settings = [state.settings or self.settings for state in states]
        above = [2.0 if settings.edits is None else settings.edits for settings in own_settings]  # no edit is above 2
        editing = any(settings.edits is not None for settings in own_settings)
        if editing:  # rows without edits predict what they hide
            inside = torch.arange(hidden.shape[1], device=hidden.device) < batch.upload(left).unsqueeze(1)
            limits = torch.tensor(above).to(hidden.device, non_blocking=True).unsqueeze(1)
            asked = torch.where(limits < 2, inside, hidden)
        # Each row's places to predict, ascending; a row with fewer of them is padded with other, distinct places.
        slots = asked.logical_not().byte().argsort(dim=1, stable=True)[:, : max(left)]
        places = (filled.unsqueeze(1) + slots) % canvas.places.shape[1]
        positions, still = canvas.places[rows.unsqueeze(1), places], hidden.gather(1, slots)
        numbers = canvas.passes[rows]
        found = self.states(canvas, passes, rows, positions)
        due = (still.sum(1) - kept).clamp(min=1)
        alike: dict[SamplingSettings, list[int]] = {}
        for place, state in enumerate(states):
            alike.setdefault(state.settings or self.settings, []).append(place)
        parts = []
        for settings, some in alike.items():  # one part, where all rows have the same settings
            those: Any = batch.upload(some) if len(alike) > 1 else slice(None)
            counts, own = [left[place] for place in some], batch.generators([live[place] for place in some])
            parts.append(self.reveal(settings, found[:, those], still[those], due[those], counts, own))
        revealed: Any = parts[0]
        if len(alike) > 1:
            order = batch.upload([*chain(*alike.values())]).argsort()
            revealed = (torch.cat(part)[order] for part in zip(*parts, strict=True))
        ids, logps, entropies, recorded, chosen = revealed
        at = (rows.unsqueeze(1), positions)
        if editing:
            edited = asked.gather(1, slots) & ~still & (ids != canvas.ids[at]) & (logps.exp() > limits)
            chosen = chosen | edited
        canvas.ids[at] = torch.where(chosen, ids, canvas.ids[at])
        canvas.sums.index_add_(0, rows, torch.where(chosen, recorded + entropies, 0.0).sum(1))
        batch.hidden[rows] = hidden = hidden.scatter(1, slots, still & ~chosen)
        if editing:  # the step's one host sync: which rows take another step
            made = torch.stack([hidden.sum(1), edited.sum(1)], dim=1).tolist()
            later = [
                hides if settings.edits is None else state.edited(hides, edits, settings.post_steps)
                for state, settings, (hides, edits) in zip(states, own_settings, made, strict=True)
            ]
        elif any(settings.rule is not None for settings in alike):
            later = hidden.sum(1).tolist()
        for state, count in zip(states, later, strict=True):
            state.left, state.step = count, state.step + 1
        so_far = canvas.passes, canvas.forward_tokens
        return Step(
            rows, numbers, positions, chosen, ids, recorded, entropies, canvas.ids, *so_far, self.settings.most_writes
        )

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

    def reveal(
        self,
        settings: SamplingSettings,
        found: Tensor,
        hidden: Tensor,
        due: Tensor,
        left: Sequence[int],
        generator: Generators,
    ) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
        """Predictions (n, k), their log-probs, entropies and recorded log-probs, and whether each is kept: those `due`
        (n,) by the schedule, or more by the rule."""
        options = {"noise_dtype": self.noise_dtype}
        ids, logps, entropies, recorded = predict(
            self.model, found, left, settings, self.mask_token_id, generator, **options
        )
        chosen = keep(settings, logps, entropies, hidden, due, left, generator)
        return ids, logps, entropies, recorded, chosen

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
            kept = [place for place, row in enumerate(live) if row not in done]
            live = [live[place] for place in kept]

    def checked(self, steps: Iterator[Step], canvas: Canvas) -> Iterator[Step]:
        """The `steps` that fill a canvas, and then NotFiniteError if a row's log-probs or entropies are not finite."""
        yield from steps
        finite = canvas.sums.isfinite().tolist()  # the rollout's one host sync at its end
        if not all(finite):
            raise self.fault(canvas, finite.index(False), finite.index(False))

    def fault(self, canvas: Canvas, row: int, number: int) -> NotFiniteError:
        """The error for a row of the canvas, which is called `number`: it names the layer. The states that are run
        again are the row's first and last, and the unconditional one of guidance."""
        seen = canvas.visible[row].bool()
        ids, given = canvas.ids[row][seen], canvas.given[row][seen]
        hidden = torch.full_like(ids, self.mask_token_id)
        return NotFiniteError(number, why_not_finite(self.model, [ids.where(given, hidden), ids, hidden]))
