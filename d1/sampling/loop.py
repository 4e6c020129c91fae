"""The reverse process: prompt -> completion, block by block (LLaDA, arXiv 2502.09992, section 2.4 and appendix B).

A canvas of `gen_length` mask tokens follows the prompt. Blocks are filled left to right; in each step the model
predicts every masked token of the current block and keeps some of its predictions. `rollout_steps` is that loop, a step
at a time; `rollout` runs it to the end and keeps a record. The loop is in `blocks.py`, and each of a step's parts has
its file: where the model's states come from (`caching.py`, `delayed.py`), which tokens it predicts from them
(`predict.py`), which of these it keeps first (`order.py`) and how many (`reveal.py`).
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import chain
from typing import Any

import torch
from torch import Tensor

from d1.models.attention import require_prepared
from d1.sampling.blocks import Step, check_sampler, fill_block, fill_canvas, groups_of_rows, start_canvas
from d1.sampling.caching import BlockPasses, Source
from d1.sampling.delayed import passes_of
from d1.sampling.predict import Generators, predict
from d1.sampling.settings import SamplingSettings


@dataclass(frozen=True)
class Rollout:
    """What sampling gives, and what it took. In fp32 a row's values do not depend on its batch; in bf16, products round
    differently in batches of other shapes, and a row that is sampled in another batch can get other tokens.

    Attributes:
        ids: (rows, prompt + gen_length), without a mask token in the completion.
        logps: (rows, gen_length) fp32, each token's log-probability in the step that revealed it: of the sampler's own
            logits (cached, guided) at temperature 1, normalised over the whole vocabulary, as scoring does. 0 where the
            EOS stop filled.
        reveal_steps: (rows, gen_length) long, the step that revealed each token: the number, from 0, of the row's own
            forward pass. -1 where the EOS stop filled.
        entropies: (rows, gen_length) fp32, in nats, of the distributions of `logps`. 0 where the EOS stop filled.
        passes: (rows,) forward passes that the row took part in.
        forward_tokens: (rows,) tokens that these fed through the body, of both branches with guidance, without padding.
            A block-causal model's cache makes them fewer and leaves all else as it is, to rounding.
    """

    ids: Tensor
    logps: Tensor
    reveal_steps: Tensor
    entropies: Tensor
    passes: Tensor
    forward_tokens: Tensor


def rollout(
    model: Any,
    prompt_ids: Tensor,
    attention_mask: Tensor,
    settings: SamplingSettings | None = None,
    *,
    mask_token_id: int,
    generator: Generators = None,
    noise_dtype: torch.dtype = torch.float32,
    eos_token_ids: Sequence[int] | None = None,
    other_blocks: bool = False,
    recompute: bool = False,
    **fields: Any,
) -> Rollout:
    """Samples a completion for each prompt.

    Args:
        model: from `d1.models.load_model`, in eval mode.
        prompt_ids: (rows, prompt) ids, padded on the left.
        attention_mask: (rows, prompt), 1 at real tokens. Padding is invisible: in fp32 a greedy row is the same in any
            batch.
        settings: how to sample; or its `fields` in place of it: `gen_length=..., block_length=..., steps=...`.
        generator: one for the batch, or one a row, which makes a row's draws independent of its batch.
        noise_dtype: of the Gumbel noise, float32 or float64.
        eos_token_ids: EOS stop: a row whose finished blocks hold one of these leaves the batch, its later blocks filled
            with the first of them. Changes no token up to a row's first EOS. Random draws then need one generator a
            row, or the rows that stay would get other numbers; so they do with a parallel sampler.
        other_blocks: let a block-causal model fill blocks of another length than its own. Its cache stays exact: a pass
            feeds those of its own blocks that the filled one has a part of.
        recompute: have a block-causal model compute everything in each step, to compare its cache with. Others do
            so anyway under the samplers exact and parallel.

    Raises:
        ValueError: the model is not prepared, or an argument makes no sense, before the first forward pass.
    """
    taken = rollout_steps(
        model,
        prompt_ids,
        attention_mask,
        settings,
        mask_token_id=mask_token_id,
        generator=generator,
        noise_dtype=noise_dtype,
        eos_token_ids=eos_token_ids,
        other_blocks=other_blocks,
        recompute=recompute,
        **fields,
    )
    whole = recorded(taken)
    first = prompt_ids.shape[1]
    return replace(whole, **{name: getattr(whole, name)[:, first:] for name in ("logps", "reveal_steps", "entropies")})


def recorded(steps: Iterable[Step]) -> Rollout:
    """The record of all `steps`, at every column of the canvas."""
    record = None
    for step in steps:
        if record is None:
            # Log-probs, entropies and steps in one tensor: one write a step in place of three.
            record = torch.zeros(3, *step.canvas.shape, device=step.canvas.device)
            record[2] = -1
        at = (slice(None), step.rows.unsqueeze(1), step.positions)
        numbers = step.numbers.unsqueeze(1).expand_as(step.logps).float()
        now = torch.stack([step.logps, step.entropies, numbers])
        record[at] = torch.where(step.revealed, now, record[at])
    assert record is not None
    logps, entropies, numbers = record
    return Rollout(step.canvas, logps, numbers.long(), entropies, step.passes, step.forward_tokens)


def generate(model: Any, prompt_ids: Tensor, attention_mask: Tensor, *args: Any, **options: Any) -> Tensor:
    """The ids (rows, prompt + gen_length) that `rollout` samples with the same arguments."""
    return rollout(model, prompt_ids, attention_mask, *args, **options).ids


def rollout_steps(
    model: Any,
    prompt_ids: Tensor,
    attention_mask: Tensor,
    settings: SamplingSettings | None = None,
    *,
    mask_token_id: int,
    generator: Generators = None,
    noise_dtype: torch.dtype = torch.float32,
    eos_token_ids: Sequence[int] | None = None,
    other_blocks: bool = False,
    recompute: bool = False,
    **fields: Any,
) -> Iterator[Step]:
    """`rollout`, with the same arguments, as one `Step` a forward pass. The canvas is whole when the last is taken.

    A row that has filled its block under a parallel sampler waits outside the batch for the next. What the EOS stop
    fills it fills between steps. A block-causal model completes rows whose prompts end at the same place of a block,
    then the next such rows, since their blocks begin and end together.

    Raises:
        ValueError: as `rollout`, at the call and not with the first step.
    """
    require_prepared(model)
    if settings is None:
        settings = SamplingSettings(**fields)
    elif fields:
        raise ValueError(f"sampling got settings and, beside them, {', '.join(fields)}: give them as settings alone")
    check_generator(settings, generator, len(prompt_ids), eos_token_ids)
    check_sampler(settings, model.config, other_blocks)
    padded = not bool(attention_mask.all())
    guess = partial(predict, model, settings=settings, mask_token_id=mask_token_id, noise_dtype=noise_dtype)
    canvas = start_canvas(prompt_ids, attention_mask, settings.gen_length, mask_token_id)
    unprompted = mask_token_id if settings.cfg_scale else None
    ends = list(eos_token_ids or [])

    def complete(after: int | None, rows: list[int]) -> Iterator[Step]:
        if after is not None and not recompute:
            source: Source = BlockPasses(model, canvas.start - after)
        else:
            source = passes_of(model, settings.cache, padded, mask_token_id)
        fill = partial(fill_block, canvas, source, guess, settings, generator=generator, unprompted=unprompted)
        schedule = settings.schedule(None if after is None else after % settings.block_length)
        return fill_canvas(canvas, fill, schedule, ends, rows)

    groups = groups_of_rows(model.config, attention_mask, settings.block_length)
    return chain.from_iterable(complete(after, rows) for after, rows in groups.items())


def check_generator(
    settings: SamplingSettings, generator: Generators, rows: int, eos_token_ids: Sequence[int] | None
) -> None:
    if isinstance(generator, Sequence):
        if len(generator) != rows:
            raise ValueError(f"sampling needs one generator a row: {len(generator)} for {rows} rows")
    elif settings.draws and (eos_token_ids is not None or settings.rule is not None):
        raise ValueError("eos_token_ids or a parallel sampler with random draws needs a list of generators, one a row")
