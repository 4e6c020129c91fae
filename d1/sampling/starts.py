"""Rollouts that continue from canvases with tokens (`RolloutStart`): what is left of each row's schedule."""

from __future__ import annotations

import torch
from torch import Tensor

from d1.sampling.loop import Row
from d1.sampling.record import Canvas, RolloutStart, Step
from d1.sampling.reveal import rest_of_schedule


def put_start(canvas: Canvas, start: RolloutStart) -> None:
    """Write into a new canvas what is there before the first pass."""
    completions = canvas.ids[:, canvas.start :]
    if start.ids.shape != completions.shape:
        raise ValueError(f"start.ids must be {tuple(completions.shape)}, got {tuple(start.ids.shape)}")
    completions.copy_(start.ids)
    canvas.passes.copy_(start.steps)


def continue_rows(rows: list[Row], start: RolloutStart, unfilled: Tensor, has_rule: bool) -> list[list[int]]:
    """Set what is left of the schedules of new rows that continue from `start`, where `unfilled` (rows, gen_length) is
    hidden. Returns the blocks of each row that hide something."""
    open_blocks: list[list[int]] = []
    hidden, reveal_steps = unfilled.cpu(), start.reveal_steps.cpu()
    for row, own, revealed, steps in zip(rows, hidden, reveal_steps, start.steps.tolist(), strict=True):
        lengths = [sum(block) for block in row.schedule]
        counts = [int(part.sum()) for part in own.split(lengths)]
        blocks = [block for block, count in enumerate(counts) if count]
        open_blocks.append(blocks)
        if not blocks:
            continue
        # The passes so far over the first of these blocks: since the one that revealed its first token.
        first = blocks[0]
        passes = revealed.split(lengths)[first]
        passes = passes[passes >= 0]
        done = [0] * len(lengths)
        if steps and len(passes):
            done[first] = steps - int(passes.min())
        # Blocks after the last one that hides something are no part of the row.
        end = blocks[-1] + 1
        row.schedule = [
            rest_of_schedule(row.schedule[block], done[block], counts[block], has_rule) if counts[block] else []
            for block in range(end)
        ]
        row.lengths = lengths[:end]
        row.block, row.filled = first - 1, sum(lengths[: max(first - 1, 0)])
    return open_blocks


def empty_step(canvas: Canvas) -> Step:
    """A step without rows."""
    rows = torch.zeros(0, dtype=torch.long, device=canvas.ids.device)
    nothing, values = rows.view(0, 0), torch.zeros(0, 0, device=rows.device)
    return Step(
        rows=rows,
        numbers=rows,
        positions=nothing,
        revealed=nothing.bool(),
        ids=nothing,
        logps=values,
        entropies=values,
        canvas=canvas.ids,
        passes=canvas.passes,
        forward_tokens=canvas.forward_tokens,
    )
