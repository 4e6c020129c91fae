"""Steps that also edit: where another token is predicted with a high probability, it replaces the one that was revealed
(LLaDA2.1, arXiv 2602.08676).

A pass predicts the whole block. After its last mask, a block takes further passes until one of them edits nothing, or
`post_steps` are made.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from functools import cache

import torch
from torch import Tensor

from d1.sampling.loop import Batch, Choice, Row, Sampler, Targets

logger = logging.getLogger(__name__)
NEVER = 2.0  # no probability is above it


class EditingSampler(Sampler):
    """The steps of rows with `edit_threshold`; in a stream, other rows may be at work with them."""

    def edit_thresholds(self, batch: Batch, progress: Sequence[Row]) -> Tensor:
        """(rows, 1) the probability above which each row edits."""
        thresholds = []
        for row in progress:
            edits = self.settings_of(row).edits
            thresholds.append(NEVER if edits is None else edits)
        return torch.tensor(thresholds).to(batch.hidden.device, non_blocking=True).unsqueeze(1)

    def positions_to_predict(
        self, batch: Batch, progress: Sequence[Row], hidden: Tensor
    ) -> tuple[Tensor, Sequence[int]]:
        if not getattr(self.model.config, "edit_noise", None):
            warn_of_edits(self.model.config.name_or_path)
        predicted, counts = super().positions_to_predict(batch, progress, hidden)
        # Rows with edits predict their whole block.
        inside = torch.arange(hidden.shape[1], device=hidden.device) < batch.upload(counts).unsqueeze(1)
        return torch.where(self.edit_thresholds(batch, progress) < NEVER, inside, predicted), counts

    def choose(self, batch: Batch, active: list[int], targets: Targets, states: Tensor, due: Tensor) -> Choice:
        choice = super().choose(batch, active, targets, states, due)
        thresholds = self.edit_thresholds(batch, [batch.rows[row] for row in active])
        differs = choice.ids != batch.canvas.ids[targets.rows.unsqueeze(1), targets.positions]
        edited = targets.is_target & ~targets.hidden & differs & (choice.logps.exp() > thresholds)
        return choice._replace(chosen=choice.chosen | edited, edited=edited)

    def advance(self, batch: Batch, active: list[int], hidden: Tensor, choice: Choice) -> None:
        assert choice.edited is not None
        # The step's one host sync: which rows take another step.
        counts = torch.stack([hidden.sum(1), choice.edited.sum(1)], dim=1).tolist()
        for index, (hides, edits) in zip(active, counts, strict=True):
            row = batch.rows[index]
            settings = self.settings_of(row)
            row.remaining = hides
            if settings.edits is not None:
                row.remaining = remaining_after_edits(row, hides, edits, settings.post_steps)
            row.step += 1


def remaining_after_edits(row: Row, hides: int, edits: int, post_steps: int) -> int:
    """What is `remaining` after a pass that made `edits` edits and left `hides` tokens hidden: nothing after a pass
    over a full block without edits, or after `post_steps` of them."""
    had_masks = row.hidden_count > 0
    row.hidden_count = hides
    if not had_masks:
        row.post_passes += 1
    is_settled = not had_masks and not edits
    if not hides and (is_settled or row.post_passes >= post_steps):
        return 0
    return row.size


@cache  # once per model
def warn_of_edits(name: str) -> None:
    logger.warning(
        "%s: its config does not say that it learnt to correct visible tokens (SFT with --edit_noise writes that; "
        "LLaDA2.1's does not). Edits by a model that was trained on masks alone spoil more than they correct",
        name,
    )
