"""The distribution that tokens are drawn from and scored under, made from a model's logits. Imports no torch."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from torch import Tensor


@dataclass(frozen=True)
class Distribution:
    """A distribution over tokens, made from a model's logits; the default is the model's own.

    Attributes:
        temperature: > 0; the logits are divided by it.
        top_k: keep only the `top_k` most likely tokens; 0: all.
        top_p: keep only the most likely tokens, as many as it takes to reach this probability together.
    """

    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0

    @property
    def truncates(self) -> bool:
        return bool(self.top_k) or self.top_p < 1

    def truncated(self, logits: Tensor) -> Tensor:
        """`logits` (..., vocab) with -inf at the tokens that are not kept; not divided by the temperature."""
        from transformers import TopKLogitsWarper, TopPLogitsWarper

        flat = (logits / self.temperature).flatten(0, -2)
        if self.top_k:
            flat = TopKLogitsWarper(min(self.top_k, flat.shape[-1]))(None, flat)  # type: ignore[arg-type]
        if self.top_p < 1:
            flat = TopPLogitsWarper(self.top_p)(None, flat)  # type: ignore[arg-type]
        return logits.masked_fill(flat.isneginf().view_as(logits), -math.inf)

    def logits(self, logits: Tensor, ids: Tensor) -> Tensor:
        """The logits (..., vocab) of this distribution, in which the tokens `ids` (...) are always kept: an update can
        make a sampled token too unlikely to be drawn again, but its ratio must stay finite."""
        if self.truncates:
            is_cut = self.truncated(logits.detach()).isneginf().scatter(-1, ids.unsqueeze(-1), False)
            logits = logits.masked_fill(is_cut, -math.inf)
        if self.temperature == 1:
            return logits
        return logits / self.temperature


MODEL_DISTRIBUTION = Distribution()  # of the logits as they are


def linear_temperature(first: float, last: float | None, number: int, passes: int) -> float:
    """The temperature of pass `number`, from 0, of `passes`: `first`, and then linearly towards `last`, which would be
    that of the pass after them (`generation_diffusion_gemma.py` of Transformers 5.24); None: always `first`."""
    if last is None:
        return first
    return last + (first - last) * (passes - number) / passes
