"""What sampling works on and returns: the canvas, what a step did to it, and the rollout that all steps make."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import torch
from torch import Tensor


@dataclass
class Canvas:
    """Texts that are being filled: the prompt and, after it, what the documents call the canvas. Positions count from
    the first column of a text, with its padding."""

    ids: Tensor  # (rows, length), with the mask token where a token is hidden
    visible: Tensor  # (rows, length), 1 at real tokens
    context_mask: Tensor  # (rows, length) bool, the real tokens that were there at the start
    fill_positions: Tensor  # (rows, n) the positions to fill: block after block, each from left to right
    passes: Tensor  # (rows,), as in `Rollout`
    forward_tokens: Tensor  # (rows,), as in `Rollout`
    # (rows,) fp32, the sum of the log-probs and entropies of all that was written: not finite once one of them was not.
    sums: Tensor

    @classmethod
    def create(cls, ids: Tensor, visible: Tensor, context_mask: Tensor, fill_positions: Tensor) -> Canvas:
        passes, forward_tokens = torch.zeros(2, len(ids), dtype=torch.long, device=ids.device)
        sums = torch.zeros(len(ids), device=ids.device)
        return cls(ids, visible, context_mask, fill_positions, passes, forward_tokens, sums)

    @property
    def start(self) -> int:
        """The position after the prompt, if all positions after the prompt are to be filled."""
        return self.ids.shape[1] - self.fill_positions.shape[1]


def start_canvas(prompt_ids: Tensor, attention_mask: Tensor, gen_length: int, mask_token_id: int) -> Canvas:
    """The canvas of a completion: mask tokens after the prompt."""
    rows, width = prompt_ids.shape
    real = attention_mask.long()
    masks = prompt_ids.new_full((rows, gen_length), mask_token_id)
    fill_positions = torch.arange(width, width + gen_length, device=prompt_ids.device)
    return Canvas.create(
        ids=torch.cat([prompt_ids, masks], dim=1),
        visible=torch.cat([real, torch.ones_like(masks)], dim=1),
        context_mask=torch.cat([real, torch.zeros_like(masks)], dim=1).bool(),
        fill_positions=fill_positions.expand(rows, -1),
    )


@dataclass(frozen=True)
class RolloutStart:
    """Canvases from which sampling continues, instead of canvases of mask tokens. The tokens that are there stay,
    except where an EOS comes before the first block that hides something: the EOS stop fills this block and all later
    ones.

    Attributes:
        ids: (rows, gen_length), with the mask token where a token is to be sampled.
        steps: (rows,) the row's forward passes so far, from which the schedule continues; 0: it begins, and each block
            spreads its hidden tokens over all of its steps.
        reveal_steps, logps, entropies: (rows, gen_length), as in `Rollout`, of the passes so far; -1, 0 and 0 at tokens
            that no pass revealed, and at hidden ones.
    """

    ids: Tensor
    steps: Tensor
    reveal_steps: Tensor
    logps: Tensor
    entropies: Tensor

    @classmethod
    def from_ids(cls, ids: Tensor) -> RolloutStart:
        """Canvases (rows, gen_length) with some tokens that are given in advance."""
        zeros = torch.zeros(ids.shape, device=ids.device)
        return cls(
            ids=ids,
            steps=torch.zeros_like(ids[:, 0]),
            reveal_steps=torch.full_like(ids, -1),
            logps=zeros,
            entropies=zeros,
        )

    @classmethod
    def from_rollout(cls, sampled: Rollout, step: int, mask_token_id: int) -> RolloutStart:
        """The canvases of a rollout without edits, which began with mask tokens alone, before its forward pass `step`;
        the whole canvases of rows that took fewer passes, without what the EOS stop filled."""
        was_revealed = (sampled.reveal_steps >= 0) & (sampled.reveal_steps < step)
        canvas = sampled.ids[:, -was_revealed.shape[1] :]
        return cls(
            ids=torch.where(was_revealed, canvas, mask_token_id),
            steps=sampled.passes.clamp(max=step),
            reveal_steps=torch.where(was_revealed, sampled.reveal_steps, -1),
            logps=torch.where(was_revealed, sampled.logps, 0.0),
            entropies=torch.where(was_revealed, sampled.entropies, 0.0),
        )

    def select(self, rows: Any) -> RolloutStart:
        """Some of the rows: a slice or an index."""
        return RolloutStart(
            ids=self.ids[rows],
            steps=self.steps[rows],
            reveal_steps=self.reveal_steps[rows],
            logps=self.logps[rows],
            entropies=self.entropies[rows],
        )

    def add_to(self, sampled: Rollout) -> Rollout:
        """The rollout that continued from here, with the record of the passes before."""
        is_kept = self.ids == sampled.ids[:, -self.ids.shape[1] :]  # the EOS stop replaces others
        was_revealed = is_kept & (self.reveal_steps >= 0)
        return replace(
            sampled,
            logps=torch.where(was_revealed, self.logps, sampled.logps),
            reveal_steps=torch.where(was_revealed, self.reveal_steps, sampled.reveal_steps),
            entropies=torch.where(was_revealed, self.entropies, sampled.entropies),
        )


@dataclass(frozen=True)
class Step:
    """What one forward pass did to the n rows that took part in it."""

    rows: Tensor  # (n,) which rows of the batch
    numbers: Tensor  # (n,) how many earlier passes each of these rows took part in
    # (n, k) masked positions of the text, prompt included, left to right; short rows are padded with revealed ones.
    positions: Tensor
    # With editing, all positions of the block.
    revealed: Tensor  # (n, k) bool, whether the pass wrote its prediction there: to a masked position or as an edit
    ids: Tensor  # (n, k) the predictions; log-probs and entropies are those of `Rollout`
    logps: Tensor  # (n, k)
    entropies: Tensor  # (n, k)
    canvas: Tensor  # (rows, length) ids after this pass; later passes change this tensor and the next two in place
    passes: Tensor  # (rows,) so far, as in `Rollout`
    forward_tokens: Tensor  # (rows,) so far, as in `Rollout`
    max_writes: int = 1  # `SamplingSettings.max_writes`
    noised: Tensor | None = None  # (n, k) bool, with uniform noise: what it wrote there is no draw of the model


class Writes(NamedTuple):
    """All that a sampler that edits wrote: (rows, gen_length, writes) each, the writes of a position in their order.

    With uniform noise (`uniform.py`), each position has a write per pass of its block, after that of the first noise:
    before pass k, from 0, it showed write k."""

    ids: Tensor  # 0 where a position was written less often
    # The number, from 0, of the row's own forward pass; -1 where a position was written less often; -2 where what was
    # written is no draw of the model: uniform noise, or the argmax of a block's last pass
    steps: Tensor
    logps: Tensor  # as in `Rollout`
    entropies: Tensor  # as in `Rollout`


@dataclass(frozen=True)
class Rollout:
    """The result of sampling and its cost. In fp32 a row's values do not depend on its batch.

    Log-probs and entropies come from the sampler's own logits (with cache and guidance) at temperature 1, over the
    whole vocabulary, in the step that revealed the token or, with editing, wrote it last. Tokens that the EOS stop
    filled have 0, and step -1. With `record_as_sampled`, log-probs are those of the distribution drawn from; with
    uniform noise, log-probs and entropies are always those.
    """

    ids: Tensor  # (rows, prompt + gen_length), without a mask token in the completion
    logps: Tensor  # (rows, gen_length) fp32, in nats
    reveal_steps: Tensor  # (rows, gen_length) long, the row's own forward pass that revealed the token, from 0
    entropies: Tensor  # (rows, gen_length) fp32, in nats
    passes: Tensor  # (rows,) forward passes that the row took part in; with a `RolloutStart`, also those before it
    forward_tokens: Tensor  # (rows,) tokens processed by the transformer in these, over all branches, without padding
    writes: Writes | None = None  # None without editing
    # (rows,) the pass before which a row continued that of another row: tokens with an earlier step are the other's;
    # 0: all are its own. None: no row did.
    start_steps: Tensor | None = None

    @classmethod
    def from_record(cls, ids: Tensor, record: Tensor, passes: Tensor, forward_tokens: Tensor) -> Rollout:
        """A rollout from a `record` made by `empty_record`."""
        logps, entropies, steps, written_ids = record  # (rows, canvas, writes) each
        writes = None
        if record.shape[-1] > 1:
            writes = Writes(ids=written_ids.long(), steps=steps.long(), logps=logps, entropies=entropies)

        # Of each position, the last write that is a draw of the model; (rows, canvas, 1).
        index = torch.arange(record.shape[-1], device=record.device)
        last = index.where(steps >= 0, 0).amax(-1, keepdim=True)
        return cls(
            ids=ids,
            logps=logps.gather(-1, last).squeeze(-1),
            reveal_steps=steps.gather(-1, last).squeeze(-1).clamp(min=-1).long(),
            entropies=entropies.gather(-1, last).squeeze(-1),
            passes=passes,
            forward_tokens=forward_tokens,
            writes=writes,
        )

    @classmethod
    def concatenate(cls, parts: Sequence[Rollout]) -> Rollout:
        """The rows of several rollouts in one."""
        joined: dict[str, Any] = {}
        for name, first in vars(parts[0]).items():
            values = [getattr(part, name) for part in parts]
            if first is None:
                joined[name] = None
            elif name == "writes":
                joined[name] = Writes(*(torch.cat(tensors) for tensors in zip(*values, strict=True)))
            else:
                joined[name] = torch.cat(values)
        return cls(**joined)

    @property
    def edits(self) -> Tensor:
        """(rows,) how many tokens replaced one that was revealed before."""
        if self.writes is None:
            return torch.zeros_like(self.passes)
        drawn = self.writes.steps >= 0
        return (drawn.sum(-1) - drawn.any(-1).long()).sum(1)

    @property
    def first_ids(self) -> Tensor:
        """(rows, prompt + gen_length) `ids` with the token that was written first at each position, before edits."""
        if self.writes is None:
            return self.ids
        start = self.ids.shape[1] - self.logps.shape[1]
        completion = torch.where(self.writes.steps[..., 0] < 0, self.ids[:, start:], self.writes.ids[..., 0])
        return torch.cat([self.ids[:, :start], completion], dim=1)

    @property
    def max_writes(self) -> Tensor:
        """(rows,) the largest number of writes to one position."""
        if self.writes is None:
            return torch.ones_like(self.passes)
        return (self.writes.steps != -1).sum(-1).amax(-1)


def empty_record(rows: int, length: int, device: Any, writes: int = 1) -> Tensor:
    """(4, rows, length, writes): log-probs, entropies, steps and ids of a `Rollout`, in one tensor, so that a step is
    one write."""
    record = torch.zeros(4, rows, length, writes, device=device)
    record[2] = -1
    return record


def record_step(record: Tensor, step: Step, first: int = 0) -> None:
    """Write what a step revealed into a record of the canvas from position `first` on."""
    numbers = step.numbers.unsqueeze(1).expand_as(step.logps)
    written = step.revealed
    if step.noised is not None:
        numbers = numbers.masked_fill(step.noised, -2)
        written = written | step.noised
    now = torch.stack([step.logps, step.entropies, numbers.float(), step.ids.float()])  # exact up to 2^24

    # Each position's next free write, (4, n, k, writes).
    at = (slice(None), step.rows.unsqueeze(1), step.positions - first)
    before = record[at]
    count = (before[2] != -1).sum(-1, keepdim=True)
    is_next = torch.arange(record.shape[-1], device=record.device) == count
    record[at] = torch.where(written.unsqueeze(-1) & is_next, now.unsqueeze(-1), before)


def rollout_of(steps: Iterable[Step], first: int = 0) -> Rollout:
    """The rollout that all `steps` make, at every position of the text from `first` on."""
    record = None
    for step in steps:
        if record is None:
            rows, length = step.canvas.shape
            record = empty_record(rows, length - first, step.canvas.device, step.max_writes)
        record_step(record, step, first)
    assert record is not None
    return Rollout.from_record(step.canvas, record, step.passes, step.forward_tokens)
