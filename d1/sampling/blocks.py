"""The loop of the reverse process: mask tokens, filled block after block, one forward pass a step."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import accumulate
from math import lcm
from typing import Any

import torch
from torch import Tensor

from d1.models.attention import attention_of
from d1.models.kinds import attention_name, block_size
from d1.sampling.caching import Source, check_cacheable
from d1.sampling.order import REMASKING, best_first
from d1.sampling.predict import Generators, uniform
from d1.sampling.reveal import RULES
from d1.sampling.settings import SamplingSettings


@dataclass(frozen=True)
class Step:
    """What one forward pass did to the n rows that took part in it. Nothing is copied or read back for it.

    Attributes:
        rows: (n,) which rows of the batch.
        numbers: (n,) how many passes each of them took part in before.
        positions: (n, k) columns of the canvas: each row's places that were hidden, from left to right, then, where it
            hid fewer than another row, some that were not.
        revealed: (n, k) bool, whether the pass revealed its prediction there.
        ids, logps, entropies: (n, k) the predictions; log-probs and entropies as in `Rollout`.
        canvas: (rows, length) ids after this pass: prompt and completion, or the text that `fill_steps` fills. The loop
            goes on writing to it, and to the next two.
        passes, forward_tokens: (rows,) so far, as in `Rollout`.
    """

    rows: Tensor
    numbers: Tensor
    positions: Tensor
    revealed: Tensor
    ids: Tensor
    logps: Tensor
    entropies: Tensor
    canvas: Tensor
    passes: Tensor
    forward_tokens: Tensor


@dataclass
class Canvas:
    """The rows of a text that is being filled: (rows, length) or, of `passes` and `forward_tokens`, (rows,).

    Attributes:
        ids: with the mask token where a token is hidden.
        visible: 1 at real tokens.
        given: bool, the real tokens that were there to begin with.
        places: (rows, n) the columns to fill: one block's after the other's, and a block's from left to right.
    """

    ids: Tensor
    visible: Tensor
    given: Tensor
    places: Tensor
    passes: Tensor
    forward_tokens: Tensor

    @classmethod
    def of(cls, ids: Tensor, visible: Tensor, given: Tensor, places: Tensor) -> Canvas:
        counts = torch.zeros(2, len(ids), dtype=torch.long, device=ids.device)
        return cls(ids, visible, given, places, *counts)

    @property
    def start(self) -> int:
        """Where the prompt ends, if all behind it is to be filled."""
        return self.ids.shape[1] - self.places.shape[1]


def start_canvas(prompt_ids: Tensor, attention_mask: Tensor, gen_length: int, mask_token_id: int) -> Canvas:
    """The canvas of a completion: mask tokens behind the prompt."""
    (rows, width), device = prompt_ids.shape, prompt_ids.device
    real, masks = attention_mask.long(), prompt_ids.new_full((rows, gen_length), mask_token_id)
    return Canvas.of(
        ids=torch.cat([prompt_ids, masks], dim=1),
        visible=torch.cat([real, torch.ones_like(masks)], dim=1),
        given=torch.cat([real, torch.zeros_like(masks)], dim=1).bool(),
        places=torch.arange(width, width + gen_length, device=device).expand(rows, -1),
    )


def check_sampler(settings: SamplingSettings, config: Any, other_blocks: bool = False) -> None:
    """Raises ValueError for settings that do not go with a kind of model.

    Args:
        other_blocks: a block-causal model may fill blocks of another length than its own.
    """
    if settings.cache is not None:
        check_cacheable(config)
        caches = attention_of(config).caches
        if caches is not None and settings.cache not in caches:
            raise ValueError(
                f"the cache {settings.cache} is wrong for {attention_name(config)} attention, which allows "
                f"{', '.join(caches) or 'none'}: use the sampler exact or parallel"
            )
    size = block_size(config)
    if not other_blocks and size not in (None, settings.block_length):
        raise ValueError(
            f"this {config.model_type} has blocks of {size} tokens, so block_length must be {size}, not "
            f"{settings.block_length}; d1.sampling.rollout takes another one with other_blocks=True"
        )


def groups_of_rows(config: Any, attention_mask: Tensor, block_length: int) -> dict[int | None, list[int]]:
    """Rows whose blocks begin and end together: of a block-causal model, by how many tokens their prompts have after
    the last place where both a block of the model and one of `block_length` begin; of other models all, under None."""
    rows, size = range(len(attention_mask)), block_size(config)
    if size is None:
        return {None: list(rows)}
    after = (attention_mask.long().sum(1) % lcm(size, block_length)).tolist()
    return {count: [row for row in rows if after[row] == count] for count in sorted(set(after))}


@torch.no_grad()
def fill_canvas(
    canvas: Canvas,
    fill: Callable[..., Iterator[Step]],
    schedule: list[list[int]],
    ends: list[int],
    rows: list[int],
) -> Iterator[Step]:
    """Fills the `rows` block after block; those whose finished blocks of a completion hold one of `ends` take part no
    more.

    Args:
        fill: `fill_block` with all given but the rows, the places filled before and the tokens it reveals a step.
    """
    filled, live, device = 0, rows, canvas.ids.device
    stops = torch.tensor(ends, dtype=canvas.ids.dtype).to(device, non_blocking=True)
    own = torch.zeros(len(canvas.ids), dtype=torch.bool).index_fill_(0, torch.tensor(rows), True)
    own = own.to(device, non_blocking=True)
    for reveals in schedule:
        yield from fill(live, filled, reveals)
        filled += sum(reveals)
        start = canvas.start + filled
        if ends and start < canvas.ids.shape[1]:
            ended = torch.isin(canvas.ids[:, canvas.start : start], stops).any(1) & own
            canvas.ids[:, start:].masked_fill_(ended.unsqueeze(1), ends[0])
            done = ended.tolist()  # the block's one host sync
            live = [row for row in rows if not done[row]]
            if not live:
                return


def fill_block(
    canvas: Canvas,
    source: Source,
    guess: Callable[..., tuple[Tensor, Tensor, Tensor]],
    settings: SamplingSettings,
    live: list[int],
    filled: int,
    reveals: list[int],
    *,
    generator: Generators,
    unprompted: int | None,
) -> Iterator[Step]:
    """Reveals a block in the rows `live`, the next of their `places`; the others stay as they are.

    Args:
        guess: `predict` with all given but states, counts and generator.
        filled: how many of the `places` come before the block.
        reveals: the schedule's tokens a step.
        unprompted: the mask token, which hides what was given in guidance's unconditional branch; None without
            guidance.
    """
    size, device = sum(reveals), canvas.ids.device
    source.enter(live, canvas.start + filled, canvas.start + filled + size)
    # The rows still at work on the block, and how many of its tokens each hides. The copy does not wait for the device.
    rows = torch.tensor(live).to(device, non_blocking=True)
    columns = canvas.places[rows, filled : filled + size]
    left = [size] * len(live)
    hidden = torch.ones(len(live), size, dtype=torch.bool, device=device)
    for scheduled in accumulate(reveals):
        # Each row's hidden places, ascending; then, where it has fewer than another row, some that are revealed.
        slots = hidden.logical_not().byte().argsort(dim=1, stable=True)[:, : max(left)]
        positions, still = columns.gather(1, slots), hidden.gather(1, slots)
        numbers = canvas.passes[rows]
        states = run_body(canvas, source, rows, positions, unprompted)
        own = [generator[row] for row in live] if isinstance(generator, Sequence) else generator
        ids, logps, entropies = guess(states, left, generator=own)
        due = (still.sum(1) - (size - scheduled)).clamp(min=1)
        chosen = choose(settings, logps, entropies, still, due, partial(uniform, logps.shape, own, logps))
        at = (rows.unsqueeze(1), positions)
        canvas.ids[at] = torch.where(chosen, ids, canvas.ids[at])
        hidden = hidden.scatter(1, slots, still & ~chosen)
        yield Step(
            rows, numbers, positions, chosen, ids, logps, entropies, canvas.ids, canvas.passes, canvas.forward_tokens
        )

        if settings.rule is None:
            left = [size - scheduled] * len(live)  # known without asking the device
            continue
        left = hidden.sum(1).tolist()  # the step's one host sync: is there another step, and of which rows?
        working = [i for i, count in enumerate(left) if count]
        if not working:
            return
        if len(working) < len(left):
            live, left = [live[i] for i in working], [left[i] for i in working]
            picked = torch.tensor(working).to(device, non_blocking=True)
            source.keep(torch.cat([picked + branch * len(rows) for branch in range(len(states))]))
            rows, columns, hidden = rows[picked], columns[picked], hidden[picked]


def run_body(canvas: Canvas, source: Source, rows: Tensor, positions: Tensor, unprompted: int | None) -> Tensor:
    """Hidden states (branches, n, k, hidden) at `positions` (n, k) of `rows`: with what was given and, under guidance,
    without it."""
    branches = [canvas.ids[rows]]
    if unprompted is not None:
        branches.append(branches[0].masked_fill(canvas.given[rows], unprompted))
    visible = canvas.visible[rows].repeat(len(branches), 1)
    states, fed = source.states(torch.cat(branches), visible, positions.repeat(len(branches), 1))
    canvas.passes[rows] += 1
    canvas.forward_tokens[rows] += fed.unflatten(0, (len(branches), -1)).sum(0)
    return states.unflatten(0, (len(branches), -1))


def choose(
    settings: SamplingSettings,
    logps: Tensor,
    entropies: Tensor,
    hidden: Tensor,
    due: Tensor,
    draw: Callable[[], Tensor],
) -> Tensor:
    """Which of the predictions (n, k) are kept: those `due` (n,) by the schedule, or more by the rule; bool.

    Args:
        hidden: (n, k) bool, where a prediction has use.
        draw: uniform numbers (n, k).
    """
    order, _ = REMASKING[settings.remasking]
    places, scores = best_first(order(logps, entropies, draw), hidden)
    if settings.rule is not None:
        rule, _ = RULES[settings.rule]
        due = rule(scores, entropies.gather(1, places), settings.level).maximum(due).minimum(hidden.sum(1))
    return places.argsort(dim=-1) < due.unsqueeze(1)
