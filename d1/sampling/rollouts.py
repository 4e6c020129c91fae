"""Rollouts: a completion for each prompt of a batch."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from math import lcm
from typing import Any

import torch
from torch import Tensor

from d1.masking import token_ids
from d1.models.attention import has_causal_context, require_prepared
from d1.models.kinds import block_size
from d1.sampling.caches import cache_of
from d1.sampling.loop import Batch, Row, Stops
from d1.sampling.other_samplers import other_sampler, sampler_name
from d1.sampling.passes import KVCacheRows
from d1.sampling.predict import Generators
from d1.sampling.record import Rollout, RolloutStart, Step, rollout_of, start_canvas
from d1.sampling.samplers import make_sampler
from d1.sampling.settings import SamplingSettings, check_mask_token_id, check_sampler, check_start
from d1.sampling.starts import continue_rows, empty_step, put_start


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
    sampled = rollout_of(rollout_steps(model, prompt_ids, attention_mask, settings, **options), prompt_ids.shape[1])
    start: RolloutStart | None = options.get("start")
    return sampled if start is None else start.add_to(sampled)


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
    cache_rows: Sequence[KVCacheRows | None] | None = None,
    start: RolloutStart | None = None,
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
        stops: with the EOS stop, another end: it is asked about the finished blocks of a row, on the host. Without
            `eos_token_ids`, all blocks are sampled, and it is not asked.
        cache_rows: of each row, the keys and values of an earlier text that begins its prompt: an exact cache reads
            them, and replaces them by its own when the row ends.
        start: canvases to continue from. A run that continues an earlier one with the same generators, and in the same
            batch, gives what the earlier one would have given: to the bit without a cache, up to rounding with the
            exact cache of a block-causal model. The first step has no rows.
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

    # Refuse what makes no sense at the call, not at the first step.
    if prompt_ids.dim() != 2 or prompt_ids.shape != attention_mask.shape:
        shapes = f"{tuple(prompt_ids.shape)} and {tuple(attention_mask.shape)}"
        raise ValueError(f"prompt_ids and attention_mask must be (rows, prompt), got {shapes}")
    if not len(prompt_ids):
        raise ValueError("there is no row to sample")
    settings = settings.for_model(model.config)
    check_generator(settings, generator, len(prompt_ids), eos_token_ids)
    check_sampler(settings, model.config, other_blocks)
    check_mask_token_id(mask_token_id, model.config)
    if start is not None:
        check_start(settings, model.config)
        if cache_rows is not None:
            raise ValueError("start: canvases that are continued take no cache_rows of an earlier text")

    # Uniform noise and SCDD have loops of their own.
    steps_of_all = other_sampler(model.config, settings)
    if steps_of_all is not None:
        if stops is not None or cache_rows is not None:
            name = sampler_name(settings)
            raise ValueError(f"{name} has no stops within a completion and no cache of an earlier text")
        generators = generator if isinstance(generator, Sequence) else []
        return steps_of_all(model, prompt_ids, attention_mask, settings, generators, eos_token_ids or (), mask_token_id)

    needs_attention_mask = not bool(attention_mask.all())
    sampler = make_sampler(model, settings, mask_token_id, noise_dtype)
    canvas = start_canvas(prompt_ids, attention_mask, settings.gen_length, mask_token_id)
    if start is not None:
        put_start(canvas, start)

    # The rows: their schedule, and where in a block of a block-causal model their prompt ends.
    prompts_in_block: list[int | None] = []
    rows: list[Row] = []
    lengths = prompt_lengths(model.config, attention_mask)
    caches = cache_rows or [None] * len(lengths)
    for number, (length, row_cache) in enumerate(zip(lengths, caches, strict=True)):
        prompt_in_block = tokens_inside(model.config, length, settings.block_length)
        prompts_in_block.append(prompt_in_block)
        if prompt_in_block is None:
            schedule = settings.schedule()
        else:
            schedule = settings.schedule(prompt_in_block % settings.block_length)
        prompt_width = canvas.start
        if row_cache is not None and length is not None:  # cached tokens are counted without padding
            prompt_width = length
        row = Row(
            number=number,
            prompt=prompt_width,
            prompt_in_block=prompt_in_block or 0,
            schedule=schedule,
            stops=stops,
            cache_rows=row_cache,
            eos_token_ids=tuple(eos_token_ids or ()),
            first_token=settings.first_token,
        )
        rows.append(row)

    # Rows whose prompts end at the same position of a block, and that hide something in the same blocks: these, and so
    # their passes, are aligned.
    groups: dict[tuple[int, ...], list[int]] = {}
    unfilled = None
    if start is None:
        for number, prompt_in_block in enumerate(prompts_in_block):
            groups.setdefault((prompt_in_block or 0,), []).append(number)
    else:
        unfilled = start.ids == mask_token_id
        open_blocks = continue_rows(rows, start, unfilled, settings.rule is not None)
        for number, (prompt_in_block, blocks) in enumerate(zip(prompts_in_block, open_blocks, strict=True)):
            if blocks:
                groups.setdefault((prompt_in_block or 0, *blocks), []).append(number)
    batch = Batch.create(rows, canvas, generator, unfilled)
    cache = cache_of(model.config, settings.cache, recompute)

    def all_steps() -> Iterator[Step]:
        if start is not None:  # its rows may all be whole
            yield empty_step(canvas)
        for group in sorted(groups):
            passes = sampler.passes(
                cache, device=canvas.ids.device, needs_attention_mask=needs_attention_mask, aligned=True
            )
            yield from sampler.unmask_rows(batch, groups[group], passes, eos_token_ids or ())

    return sampler.check_finite(all_steps(), canvas)


def check_generator(
    settings: SamplingSettings, generator: Generators, rows: int, eos_token_ids: Sequence[int] | None
) -> None:
    if isinstance(generator, Sequence):
        if len(generator) != rows:
            raise ValueError(f"sampling needs one generator per row, got {len(generator)} for {rows} rows")
    elif settings.draws and (eos_token_ids is not None or settings.rule is not None or settings.sampler == "scdd"):
        raise ValueError(
            "random draws with eos_token_ids, a parallel sampler or the sampler scdd need a list of generators, one "
            "per row"
        )


def prompt_lengths(config: Any, attention_mask: Tensor) -> list[int | None]:
    """The tokens of each prompt of a model with blocks; None for other models. ValueError for padding on the right, and
    with a causal context for a prompt without tokens."""
    if block_size(config) is None:
        return [None] * len(attention_mask)
    is_token = attention_mask.long().cpu()
    if (is_token.diff(dim=1) < 0).any():
        raise ValueError("prompts must be padded on the left (tokenizer.padding_side): the completion follows them")
    lengths: list[int | None] = is_token.sum(1).tolist()
    if has_causal_context(config) and not all(lengths):
        raise ValueError("a prompt is empty: a model with a causal context predicts from at least one token")
    return lengths


def tokens_inside(config: Any, length: int | None, block_length: int) -> int | None:
    """How many of the `length` tokens of a prompt follow the last position where a block of the model and a block of
    `block_length` tokens begin together; None without blocks. With a causal context, blocks begin at the end of the
    prompt."""
    if length is None:
        return None
    if has_causal_context(config):
        return 0
    return length % lcm(config.block_size, block_length)
