"""The texts that a forward pass of scoring reads."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

from d1.scoring.inputs import CanvasBlocks


class ViewText(NamedTuple):
    """Texts as views show them, (rows, prompt + canvas) each.

    Attributes:
        clean: ids of the prompts and completions.
        shown: ids that the views show where they hide nothing.
        hidden: bool, what the views hide.
        visible: 1 at real tokens; None: attention gets no mask.
        gen_length: tokens of the canvas.
        mask_token_id: None for a model with uniform noise.
        blocks: as for `score`.
    """

    clean: Tensor
    shown: Tensor
    hidden: Tensor
    visible: Tensor | None
    gen_length: int
    mask_token_id: Any
    blocks: CanvasBlocks | None

    @property
    def noised(self) -> Tensor:
        """The shown ids, with mask tokens where they are hidden."""
        return self.shown.masked_fill(self.hidden, self.mask_token_id)

    @property
    def finished(self) -> Tensor:
        """The prompt as the views show it, and the clean canvas."""
        return torch.cat([self.noised[:, : -self.gen_length], self.clean[:, -self.gen_length :]], dim=1)
