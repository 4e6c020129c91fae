"""The reverse process: prompt -> completion, block by block (LLaDA, arXiv 2502.09992, section 2.4 and appendix B).

A canvas of `gen_length` mask tokens follows the prompt. Blocks are filled from left to right; in each step the model
predicts every masked token of the current block, and some of the predictions are kept. The loop is in `blocks.py`. Each
part of a step has its own file: the model's states (`passes.py`, `caches.py`), the predicted tokens (`predict.py`), and
the choice of those that are kept (`reveal.py`).
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import chain
from typing import Any, NamedTuple

import torch
from torch import Tensor

from d1.models.attention import require_prepared
from d1.sampling.blocks import Sampler, Step, check_sampler, tokens_inside
from d1.sampling.caches import cache_of
from d1.sampling.canvas import Batch, Row, start_canvas
from d1.sampling.predict import Generators
from d1.sampling.settings import SamplingSettings


class Writes(NamedTuple):
    """All that a sampler that edits wrote: (rows, gen_length, writes) each, the writes of a place in their order.

    Attributes:
        ids: the tokens; 0 where a place was written less often.
        steps: the number, from 0, of the row's own forward pass; -1 where a place was written less often.
        logps, entropies: as in `Rollout`.
    """

    ids: Tensor
    steps: Tensor
    logps: Tensor
    entropies: Tensor


@dataclass(frozen=True)
class Rollout:
    """The result of sampling and its cost. In fp32 a row's values do not depend on its batch.

    Log-probs and entropies come from the sampler's own logits (with cache and guidance) at temperature 1, over the
    whole vocabulary, in the step that revealed the token. Tokens that the EOS stop filled have 0, and step -1. With
    `SamplingSettings.record_as_sampled`, log-probs are those of the distribution that tokens were drawn from.

    With editing they are those of the last write, and `writes` has all of them.
    """

    ids: Tensor  # (rows, prompt + gen_length), without a mask token in the completion
    logps: Tensor  # (rows, gen_length) fp32, in nats
    reveal_steps: Tensor  # (rows, gen_length) long, the row's own forward pass that revealed the token, from 0
    entropies: Tensor  # (rows, gen_length) fp32, in nats
    passes: Tensor  # (rows,) forward passes that the row took part in
    forward_tokens: Tensor  # (rows,) tokens processed by the transformer in these, over all branches, without padding
    writes: Writes | None = None  # None without editing

    @classmethod
    def of(cls, ids: Tensor, record: Tensor, passes: Tensor, forward_tokens: Tensor) -> Rollout:
        """A rollout from a `record` made by `blank_record`."""
        logps, entropies, numbers, written = record
        writes = Writes(written.long(), numbers.long(), logps, entropies) if record.shape[-1] > 1 else None
        last = ((numbers >= 0).sum(-1, keepdim=True) - 1).clamp(min=0)
        logps, entropies, numbers = (of_writes.gather(-1, last).squeeze(-1) for of_writes in record[:3])
        return cls(ids, logps, numbers.long(), entropies, passes, forward_tokens, writes)

    @classmethod
    def joined(cls, parts: Sequence[Rollout]) -> Rollout:
        """The rows of several rollouts in one."""
        columns: dict[str, Any] = {name: [getattr(part, name) for part in parts] for name in vars(parts[0])}
        writes = columns.pop("writes")
        columns = {name: torch.cat(values) for name, values in columns.items()}
        return cls(**columns, writes=None if writes[0] is None else Writes(*map(torch.cat, zip(*writes, strict=True))))

    @property
    def edits(self) -> Tensor:
        """(rows,) how many tokens replaced one that was revealed before."""
        if self.writes is None:
            return torch.zeros_like(self.passes)
        return (self.writes.steps[..., 1:] >= 0).sum((1, 2))

    @property
    def first_ids(self) -> Tensor:
        """(rows, prompt + gen_length) `ids` with the token that was written first at each place, before all edits."""
        if self.writes is None:
            return self.ids
        start = self.ids.shape[1] - self.logps.shape[1]
        own = torch.where(self.writes.steps[..., 0] < 0, self.ids[:, start:], self.writes.ids[..., 0])
        return torch.cat([self.ids[:, :start], own], dim=1)

    @property
    def most_writes(self) -> Tensor:
        """(rows,) how often the place that was written most often was."""
        return torch.ones_like(self.passes) if self.writes is None else (self.writes.steps >= 0).sum(-1).amax(-1)


def rollout(
    model: Any, prompt_ids: Tensor, attention_mask: Tensor, settings: SamplingSettings | None = None, **options: Any
) -> Rollout:
    """Sample a completion for each prompt.

    Args:
        model: from `d1.models.load_model`, in eval mode.
        prompt_ids: (rows, prompt) ids, padded on the left.
        attention_mask: (rows, prompt), 1 at real tokens. Padding is invisible: in fp32 a greedy row is the same in any
            batch.
        settings: how to sample; instead, give its fields: `gen_length=..., block_length=..., steps=...`.
        options: keyword arguments of `rollout_steps`; `mask_token_id` is required.

    Raises:
        ValueError: the model is not prepared, or an argument is wrong; raised before the first forward pass.
    """
    whole = recorded(rollout_steps(model, prompt_ids, attention_mask, settings, **options))
    first = prompt_ids.shape[1]
    parts: dict[str, Any] = {name: getattr(whole, name)[:, first:] for name in ("logps", "reveal_steps", "entropies")}
    if whole.writes is not None:
        parts["writes"] = Writes(*(values[:, first:] for values in whole.writes))
    return replace(whole, **parts)


def blank_record(rows: int, length: int, device: Any, writes: int = 1) -> Tensor:
    """(4, rows, length, writes): log-probs, entropies, steps and ids of a `Rollout` in one tensor, so that a step is
    one write."""
    record = torch.zeros(4, rows, length, writes, device=device)
    record[2] = -1
    return record


def note(record: Tensor, step: Step, first: int = 0) -> None:
    """Write what a step revealed into a record of the canvas from column `first` on."""
    at = (slice(None), step.rows.unsqueeze(1), step.positions - first)
    numbers = step.numbers.unsqueeze(1).expand_as(step.logps)
    now = torch.stack([step.logps, step.entropies, numbers.float(), step.ids.float()])  # exact up to 2^24
    before = record[at]
    place = torch.arange(record.shape[-1], device=record.device) == (before[2] >= 0).sum(-1, keepdim=True)
    record[at] = torch.where(step.revealed.unsqueeze(-1) & place, now.unsqueeze(-1), before)


def recorded(steps: Iterable[Step]) -> Rollout:
    """The record of all `steps`, at every column of the canvas."""
    record = None
    for step in steps:
        if record is None:
            record = blank_record(len(step.canvas), step.canvas.shape[1], step.canvas.device, step.most_writes)
        note(record, step)
    assert record is not None
    return Rollout.of(step.canvas, record, step.passes, step.forward_tokens)


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
    """`rollout`, as an iterator of one `Step` per forward pass. After the last step the canvas is whole.

    A block-causal model completes the rows group by group: in a group, all prompts end at the same place of a block.

    Args:
        generator: one for the batch, or one per row, which makes a row's draws independent of its batch.
        noise_dtype: data type of the Gumbel noise, float32 or float64.
        eos_token_ids: turns the EOS stop on: a row whose finished blocks hold one of these ids leaves the batch, and
            its later blocks are filled with the first id. No token up to a row's first EOS changes. Random draws then
            need one generator per row, as with a parallel sampler.
        other_blocks: let a block-causal model fill blocks of another length than its own. Its cache stays exact.
        recompute: let a block-causal model compute everything in each step, as a reference for its cache.

    Raises:
        ValueError: as `rollout`; raised at the call, not at the first step.
    """
    require_prepared(model)
    if settings is None:
        settings = SamplingSettings(**fields)
    elif fields:
        raise ValueError(f"sampling got both settings and {', '.join(fields)}: put all of them into the settings")
    check_generator(settings, generator, len(prompt_ids), eos_token_ids)
    check_sampler(settings, model.config, other_blocks)
    masked = not bool(attention_mask.all())
    sampler = Sampler(model, settings, mask_token_id, noise_dtype)
    canvas = start_canvas(prompt_ids, attention_mask, settings.gen_length, mask_token_id)
    inside = tokens_inside(model.config, attention_mask, settings.block_length)
    rows = []
    for number, after in enumerate(inside):
        schedule = settings.schedule(None if after is None else after % settings.block_length)
        rows.append(Row(number, canvas.start, after or 0, schedule))
    batch = Batch.of(rows, canvas, generator)
    cache = cache_of(model.config, settings.cache, recompute)

    def complete(after: int | None) -> Iterator[Step]:
        passes = sampler.passes(cache, device=canvas.ids.device, masked=masked, aligned=True)
        live = [row for row, other in enumerate(inside) if other == after]
        return sampler.fill_canvas(batch, live, passes, eos_token_ids or ())

    return chain.from_iterable(map(complete, sorted({*inside}, key=lambda after: after or 0)))


def check_generator(
    settings: SamplingSettings, generator: Generators, rows: int, eos_token_ids: Sequence[int] | None
) -> None:
    if isinstance(generator, Sequence):
        if len(generator) != rows:
            raise ValueError(f"sampling needs one generator per row, got {len(generator)} for {rows} rows")
    elif settings.draws and (eos_token_ids is not None or settings.rule is not None):
        raise ValueError("random draws with eos_token_ids or a parallel sampler need a list of generators, one per row")
