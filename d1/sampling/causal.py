"""Steps for models with a causal context, which predict the first token of a block from the clean text before it.

With `first_token` "causal", a row whose block begins predicts this token alone, in a pass of its own. With either
setting, a block ends once nothing before its EOS is hidden.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import compress

import torch
from torch import Tensor

from d1.sampling.loop import Batch, Choice, Row, Sampler


class CausalSampler(Sampler):
    """The steps of rows with a `first_token`."""

    def positions_to_predict(
        self, batch: Batch, progress: Sequence[Row], hidden: Tensor
    ) -> tuple[Tensor, Sequence[int]]:
        begins = [row.first_token == "causal" and row.step == 0 for row in progress]
        predicted, counts = super().positions_to_predict(batch, progress, hidden)
        if not any(begins):
            return predicted, counts
        waiting = batch.upload(begins).bool().unsqueeze(1).expand_as(hidden).clone()
        waiting[:, 0] = False
        return predicted & ~waiting, [1 if alone else count for alone, count in zip(begins, counts, strict=True)]

    def advance(self, batch: Batch, active: list[int], hidden: Tensor, choice: Choice) -> None:
        super().advance(batch, active, hidden, choice)
        end_blocks(batch, active)


def end_blocks(batch: Batch, active: list[int]) -> None:
    """End the block of each row of `active` that has an EOS and, before it, nothing that is hidden: the rest of the
    block is filled with the EOS."""
    by_ends: dict[tuple[int, ...], list[int]] = {}
    for index in active:
        if batch.rows[index].first_token is not None and batch.rows[index].ends and batch.rows[index].remaining:
            by_ends.setdefault(batch.rows[index].ends, []).append(index)
    canvas, inside = batch.canvas, torch.arange(batch.hidden.shape[1], device=batch.hidden.device)
    for ends, alike in by_ends.items():
        numbers = batch.upload([[index, batch.rows[index].filled, batch.rows[index].size] for index in alike])
        rows, filled, sizes = numbers.T.unsqueeze(2)
        at = rows, canvas.fill_positions[rows, (filled + inside) % canvas.fill_positions.shape[1]]
        ids, hidden = canvas.ids[at], batch.hidden[rows.squeeze(1)]
        is_end = torch.isin(ids, batch.upload(ends)) & (hidden.cumsum(1) == 0) & (inside < sizes)
        ended = is_end.any(1, keepdim=True)
        canvas.ids[at] = torch.where(hidden & ended, ends[0], ids)
        batch.hidden[rows.squeeze(1)] = hidden & ~ended
        for index in compress(alike, ended.squeeze(1).tolist()):  # the step's host sync
            batch.rows[index].remaining = 0
