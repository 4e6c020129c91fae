"""Which of a step's predictions are kept first, called remasking: the others stay hidden for a later step.

A new order is a function here, or anywhere, and a line in the table: `REMASKING["mine"] = Order(f)`. Needs no torch to
be imported.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from torch import Tensor


def low_confidence(logps: Tensor, entropies: Tensor, uniform: Callable[[], Tensor]) -> Tensor:
    """The most likely first; the least likely stay hidden (LLaDA, arXiv 2502.09992, section 2.4)."""
    return logps


def at_random(logps: Tensor, entropies: Tensor, uniform: Callable[[], Tensor]) -> Tensor:
    """All places with equal chance (LLaDA, arXiv 2502.09992, section 2.4)."""
    return uniform()


def low_entropy(logps: Tensor, entropies: Tensor, uniform: Callable[[], Tensor]) -> Tensor:
    """The predictions of the lowest entropy first (Dream, DiffuCoder, arXiv 2506.20639)."""
    return -entropies


@dataclass(frozen=True)
class Order:
    """A row of the table.

    Attributes:
        scores: gets the log-probabilities and the entropies (rows, n) of the predictions, from left to right, and a
            function that draws uniform numbers (rows, n), each row's from its own generator where it has one. Returns
            scores (rows, n); the predictions with the highest are kept.
        draws: calls that function.
        by_confidence: the scores are the log-probabilities themselves, which reveal rules need.
    """

    scores: Callable[[Tensor, Tensor, Callable[[], Tensor]], Tensor]
    draws: bool = False
    by_confidence: bool = False


REMASKING: dict[str, Order] = {
    "low_confidence": Order(low_confidence, by_confidence=True),
    "random": Order(at_random, draws=True),
    "entropy": Order(low_entropy),
}


def best_first(scores: Tensor, hidden: Tensor) -> tuple[Tensor, Tensor]:
    """The places (rows, n) in falling order of `scores`, those that are not `hidden` last, and the scores so ordered.

    A stable sort breaks ties to the left whatever the batch; saturated confidences do tie.
    """
    scores = scores.masked_fill(~hidden, -math.inf)
    places = scores.argsort(dim=-1, descending=True, stable=True)
    return places, scores.gather(1, places)
