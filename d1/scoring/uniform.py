"""The forward pass of a view of a model with uniform noise (`d1/models/diffusion_gemma.py`): nothing is masked, and the
encoder reads the clean text before each canvas."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from d1.models.diffusion_gemma import canvas_states
from d1.models.kinds import block_size
from d1.scoring.view_text import ViewText


def uniform_states(model: Any, text: ViewText) -> Tensor:
    """The states of the canvases, each as the view shows it."""
    return canvas_states(model, text.clean, text.shown[:, -text.gen_length :], text.visible)


def uniform_tokens(config: Any, gen_length: int) -> int:
    """How many tokens the encoder reads again: it does not read the last canvas."""
    return gen_length - (block_size(config) or 0)
