"""Which steps fill a canvas: the entry of a kind of model or of settings."""

from __future__ import annotations

from typing import Any

import torch

from d1.sampling.causal import CausalSampler
from d1.sampling.edits import EditingSampler
from d1.sampling.loop import Sampler
from d1.sampling.settings import SamplingSettings


def make_sampler(model: Any, settings: SamplingSettings, mask_token_id: int, noise_dtype: torch.dtype) -> Sampler:
    """The sampler of rows that share these settings. A model with a causal context does not edit."""
    kind = Sampler
    if settings.first_token is not None:
        kind = CausalSampler
    elif settings.edits is not None:
        kind = EditingSampler
    return kind(model, settings, mask_token_id, noise_dtype)
