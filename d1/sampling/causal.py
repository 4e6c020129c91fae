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
        predicted, counts = super().positions_to_predict(batch, progress, hidden)
        begins = [row.first_token == "causal" and row.step == 0 for row in progress]
        if not any(begins):
            return predicted, counts

        # Rows whose block begins predict its first position alone.
        waiting = batch.upload(begins).bool().unsqueeze(1).expand_as(hidden).clone()
        waiting[:, 0] = False
        counts = [1 if row_begins else count for row_begins, count in zip(begins, counts, strict=True)]
        return predicted & ~waiting, counts

    def advance(self, batch: Batch, active: list[int], hidden: Tensor, choice: Choice) -> None:
        super().advance(batch, active, hidden, choice)
        end_blocks(batch, active)


def end_blocks(batch: Batch, active: list[int]) -> None:
    """End the block of each row of `active` that has an EOS and, before it, nothing that is hidden: the rest of the
    block is filled with the EOS."""
    # Rows with the same EOS stop are looked at together.
    groups: dict[tuple[int, ...], list[int]] = {}
    for index in active:
        row = batch.rows[index]
        if row.first_token is not None and row.eos_token_ids and row.remaining:
            groups.setdefault(row.eos_token_ids, []).append(index)
    canvas = batch.canvas
    in_block = torch.arange(batch.hidden.shape[1], device=batch.hidden.device)
    for eos_token_ids, indices in groups.items():
        # The tokens of their blocks, (n, block); rows, filled and sizes are (n, 1).
        numbers = batch.upload([[index, batch.rows[index].filled, batch.rows[index].size] for index in indices])
        rows, filled, sizes = numbers.T.unsqueeze(2)
        positions = canvas.fill_positions[rows, (filled + in_block) % canvas.fill_positions.shape[1]]
        ids, hidden = canvas.ids[rows, positions], batch.hidden[rows.squeeze(1)]

        # An EOS before which nothing is hidden ends the block.
        is_end = torch.isin(ids, batch.upload(eos_token_ids)) & (hidden.cumsum(1) == 0) & (in_block < sizes)
        ended = is_end.any(1, keepdim=True)
        canvas.ids[rows, positions] = torch.where(hidden & ended, eos_token_ids[0], ids)
        batch.hidden[rows.squeeze(1)] = hidden & ~ended
        for index in compress(indices, ended.squeeze(1).tolist()):  # the step's host sync
            batch.rows[index].remaining = 0
