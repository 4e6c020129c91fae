"""Fill hidden positions anywhere in a text, with text on both sides, by the same loop as a rollout."""

from __future__ import annotations

import logging
import warnings
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from d1.masking import token_ids
from d1.models.attention import count_positions, has_causal_context, require_prepared
from d1.models.kinds import block_size, require_masks
from d1.sampling.caches import NO_CACHE
from d1.sampling.loop import Batch, Row, Sampler
from d1.sampling.predict import Generators
from d1.sampling.record import Canvas, Rollout, Step, rollout_of
from d1.sampling.reveal import block_schedule
from d1.sampling.rollouts import check_generator
from d1.sampling.samplers import make_sampler
from d1.sampling.settings import (
    BLOCK_LENGTH,
    SamplingSettings,
    check_mask_token_id,
    check_sampler,
    default_steps,
    refuse_scdd,
)

logger = logging.getLogger(__name__)


def infill(model: Any, ids: Tensor, hidden: Tensor, attention_mask: Tensor | None = None, **options: Any) -> Rollout:
    """Fill the hidden positions of texts, from left to right, each with one token; all other tokens stay.

    The model sees the text on both sides; a block-causal model only sees the block of a hidden position and the blocks
    before it, and a warning says so if there is text after these.

    Args:
        model: from `d1.models.load_model`, in eval mode.
        ids: (rows, length); ids at hidden positions are ignored.
        hidden: (rows, length) bool, which tokens to fill in. Rows may have different numbers of them.
        attention_mask: (rows, length), 1 at real tokens, with padding on any side; None: no padding.
        options: keyword arguments of `infill_steps`.

    Raises:
        ValueError: the model is not prepared, or an argument is wrong; raised before the first forward pass.
        NotFiniteError: as `rollout`.
    """
    return rollout_of(infill_steps(model, ids, hidden, attention_mask, **options))


def infill_steps(
    model: Any,
    ids: Tensor,
    hidden: Tensor,
    attention_mask: Tensor | None = None,
    *,
    mask_token_id: int,
    block_length: int | None = None,
    steps: int | None = None,
    generator: Generators = None,
    noise_dtype: torch.dtype = torch.float32,
    **fields: Any,
) -> Iterator[Step]:
    """`infill`, as an iterator of one `Step` per forward pass. After the last step the canvas is whole.

    Args:
        block_length: how many hidden positions form a block, at most; None is 32. In a block-causal model, those of
            each of its own blocks form a block.
        steps: forward passes per row; a row with fewer hidden tokens takes one per token. None: one per token.
        generator: one for the batch, or one per row, which makes a row's draws independent of its batch.
        fields: other fields of `SamplingSettings`, except `gen_length`. In the unconditional branch of guidance, all
            text is hidden. Samplers with a cache are refused.

    Raises:
        ValueError: as `infill`; raised at the call, not at the first step.
        NotFiniteError: as `infill`.
    """
    require_prepared(model)
    ids = token_ids(ids)
    visible = torch.ones_like(ids)
    if attention_mask is not None:
        visible = attention_mask.long()
    seen, holes = visible.cpu(), hidden.cpu()  # the host reads nothing else from the device

    # Refuse what makes no sense at the call, not at the first step.
    if not ids.shape == hidden.shape == visible.shape or ids.dim() != 2 or hidden.dtype != torch.bool:
        shapes = ", ".join(str(tuple(tensor.shape)) for tensor in (ids, hidden, visible))
        raise ValueError(f"ids, hidden (bool) and attention_mask must be (rows, length); got {shapes}, {hidden.dtype}")
    check_mask_token_id(mask_token_id, model.config)
    if not holes.any():
        raise ValueError("no position is hidden: there is nothing to fill")
    if (holes & (seen == 0)).any():
        raise ValueError("some hidden positions are padding: attention_mask must be 1 where a token is filled in")
    # Rows that hide equally many tokens of each block have the same settings; those that hide none take no part.
    size = block_size(model.config)
    block = torch.zeros_like(seen)  # (rows, length) the number of each token's block
    if size:
        block = count_positions(seen) // size
    groups: dict[tuple[int, ...], list[int]] = {}
    for row in holes.any(1).nonzero().flatten().tolist():
        _, counts = block[row][holes[row]].unique(return_counts=True)
        groups.setdefault(tuple(counts.tolist()), []).append(row)

    # The sampler of each group, and the schedules of its rows.
    progress = [Row(number=row, prompt=0, prompt_in_block=0, schedule=[]) for row in range(len(ids))]
    samplers: dict[tuple[int, ...], Sampler] = {}
    for sizes, rows in groups.items():
        settings = infill_settings(model.config, sum(sizes), block_length=block_length, steps=steps, **fields)
        check_generator(settings, generator, len(ids), None)
        samplers[sizes] = make_sampler(model, settings, mask_token_id, noise_dtype)
        for row in rows:
            if size is None:
                progress[row].schedule = settings.schedule()
                continue
            if settings.steps < len(sizes):
                raise ValueError(
                    f"steps must be at least {len(sizes)}, one for each of the model's blocks with hidden positions, "
                    f"not {settings.steps}"
                )
            progress[row].schedule = block_schedule(sizes, settings.steps)

    # Text after the blocks with hidden positions is not read.
    first = block.masked_fill(~holes, block.shape[1]).amin(1, keepdim=True)
    if size is not None and (seen.bool() & ~holes & (block > first)).any():
        logger.warning(
            "this %s has blocks of %d tokens and sees no block after that of a hidden position: text there is not read",
            model.config.model_type,
            size,
        )

    # The canvas. Each row's hidden positions, ascending; shorter rows are padded with positions that are never filled.
    fill_positions = holes.logical_not().byte().argsort(dim=1, stable=True)[:, : int(holes.sum(1).max())]
    fill_positions = fill_positions.to(ids.device, non_blocking=True)
    canvas = Canvas.create(ids.masked_fill(hidden, mask_token_id), visible, visible.bool() & ~hidden, fill_positions)
    batch = Batch.create(progress, canvas, generator)
    needs_attention_mask = not bool(seen.all())

    def all_steps() -> Iterator[Step]:
        for sizes, rows in groups.items():
            passes = samplers[sizes].passes(
                NO_CACHE, device=ids.device, needs_attention_mask=needs_attention_mask, aligned=True
            )
            yield from samplers[sizes].unmask_rows(batch, rows, passes)

    # Any of the samplers can check the canvas: they share the model.
    sampler = next(iter(samplers.values()))
    return sampler.check_finite(all_steps(), canvas)


def infill_settings(config: Any, count: int, **fields: Any) -> SamplingSettings:
    """The settings with which a model of this `config` fills `count` hidden positions, from the `fields` that
    `infill_steps` takes; ValueError if one is wrong, or does not suit filling or the kind of model."""
    require_masks(config, "filling in")
    if has_causal_context(config):
        raise ValueError(
            f"this {config.model_type} has a causal context: it reads text from left to right and cannot fill a gap "
            "before text that is there. Sample a completion instead"
        )
    model_block = block_size(config)
    chosen = {name: value for name, value in fields.items() if value is not None}
    block_length = chosen.pop("block_length", model_block or BLOCK_LENGTH)
    steps = chosen.pop("steps", None)
    if steps is None:
        steps = default_steps(count, block_length, tokens_per_step=1)
    settings = SamplingSettings(gen_length=count, block_length=block_length, steps=min(steps, count), **chosen)
    settings = settings.for_model(config)
    refuse_scdd(settings, "filling in")
    if settings.cache is not None:
        raise ValueError(
            f"the sampler {settings.sampler} caches keys and values outside one block of consecutive positions, but "
            "hidden positions may be anywhere: use the sampler exact or parallel"
        )
    if model_block not in (None, settings.block_length):
        raise ValueError(
            f"this {config.model_type} has blocks of {model_block} tokens, whose hidden positions are filled together: "
            f"block_length must be {model_block} or left out, not {settings.block_length}"
        )
    check_sampler(settings, config)
    return settings


def fill(*args: Any, **kwargs: Any) -> Rollout:
    """Deprecated: the old name of `infill`."""
    warnings.warn("fill is now infill", FutureWarning, stacklevel=2)
    return infill(*args, **kwargs)


def fill_steps(*args: Any, **kwargs: Any) -> Iterator[Step]:
    """Deprecated: the old name of `infill_steps`."""
    warnings.warn("fill_steps is now infill_steps", FutureWarning, stacklevel=2)
    return infill_steps(*args, **kwargs)
