"""What tokens are drawn from and scored under, made of a model's logits. Needs no torch to be imported."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from torch import Tensor


@dataclass(frozen=True)
class Distribution:
    """A distribution over tokens that is made of a model's logits; the default is the model's own.

    Attributes:
        temperature: > 0; the logits are divided by it.
        top_k: only so many most likely tokens are left; 0: all.
        top_p: only the most likely tokens are left that have at least this probability together.
    """

    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0

    @property
    def truncates(self) -> bool:
        return bool(self.top_k) or self.top_p < 1

    def truncated(self, logits: Tensor) -> Tensor:
        """`logits` (..., vocab), those of the tokens that are not left at -inf; not divided."""
        from transformers import TopKLogitsWarper, TopPLogitsWarper

        flat = (logits / self.temperature).flatten(0, -2)
        if self.top_k:
            flat = TopKLogitsWarper(min(self.top_k, flat.shape[-1]))(None, flat)  # type: ignore[arg-type]
        if self.top_p < 1:
            flat = TopPLogitsWarper(self.top_p)(None, flat)  # type: ignore[arg-type]
        return logits.masked_fill(flat.isneginf().view_as(logits), -math.inf)

    def logits(self, logits: Tensor, ids: Tensor) -> Tensor:
        """The logits (..., vocab) of this distribution, in which the tokens `ids` (...) are always left: an update can
        make a token that was sampled too unlikely to be drawn again, and its ratio must stay finite."""
        if self.truncates:
            out = self.truncated(logits.detach()).isneginf().scatter(-1, ids.unsqueeze(-1), False)
            logits = logits.masked_fill(out, -math.inf)
        return logits if self.temperature == 1 else logits / self.temperature


OWN = Distribution()
