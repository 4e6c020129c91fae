"""The forward pass of a view with a causal context.

As for a block-causal model, a pass has two streams. The clean text also scores the first token of every block, if the
sampler took it from there: it is never hidden from the other tokens of its block.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from d1.models.attention import Blocks
from d1.models.packing import two_stream_states
from d1.scoring.inputs import CanvasBlocks
from d1.scoring.view_text import ViewText


def causal_states(model: Any, text: ViewText) -> Tensor:
    """The states of the canvas, from two streams: the finished text, and the canvas with what the view hides."""
    prompt = text.clean.shape[1] - text.gen_length
    size, _, causal_first = text.blocks or CanvasBlocks.from_config(model.config)
    assert size is not None

    # Blocks begin at the end of each row's prompt.
    seen = torch.ones_like(text.clean) if text.visible is None else text.visible
    blocks = Blocks(size, seen[:, :prompt].sum(1, keepdim=True))
    canvas = text.noised[:, prompt:]
    if not causal_first:
        return two_stream_states(model, text.finished, canvas, text.visible, blocks=blocks)

    # The first token of each block is shown, and its state is that of the clean token before it.
    firsts = torch.arange(0, text.gen_length, size, device=canvas.device)
    canvas = canvas.index_copy(1, firsts, text.shown[:, prompt + firsts])
    before = (prompt - 1 + firsts).expand(len(canvas), -1)
    states = two_stream_states(model, text.finished, canvas, text.visible, blocks=blocks, clean_at=before)
    return states[:, len(firsts) :].index_copy(1, firsts, states[:, : len(firsts)])
