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
    all_open: list[list[int]] = []
    all_hidden, all_reveal_steps = unfilled.cpu(), start.reveal_steps.cpu()
    for row, hidden, reveal_steps, steps in zip(rows, all_hidden, all_reveal_steps, start.steps.tolist(), strict=True):
        # Which blocks of the row hide how many tokens.
        lengths = [sum(block) for block in row.schedule]
        counts = [int(block_hidden.sum()) for block_hidden in hidden.split(lengths)]
        open_blocks = [block for block, count in enumerate(counts) if count]
        all_open.append(open_blocks)
        if not open_blocks:
            continue

        # The passes so far over the first of these blocks: since the one that revealed its first token.
        first = open_blocks[0]
        first_steps = reveal_steps.split(lengths)[first]
        first_steps = first_steps[first_steps >= 0]
        passes_over_first = 0
        if steps and len(first_steps):
            passes_over_first = steps - int(first_steps.min())

        # The rest of the schedule, up to the last block with a mask.
        end = open_blocks[-1] + 1
        schedule: list[list[int]] = []
        for block in range(end):
            rest: list[int] = []
            if counts[block]:
                done = passes_over_first if block == first else 0
                rest = rest_of_schedule(row.schedule[block], done, counts[block], has_rule)
            schedule.append(rest)
        row.schedule, row.lengths = schedule, lengths[:end]
        row.block, row.filled = first - 1, sum(lengths[: max(first - 1, 0)])
    return all_open


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
