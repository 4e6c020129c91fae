"""What RL minimises: pure functions of log-probabilities and advantages.

`objective: trl`, the default, is TRL's own loss with all its `loss_type`s and `importance_sampling_level`s; d1's is
`loss_type: bnpo`. A new one is a function here, or in a file of yours, and a line in `OBJECTIVES`.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from torch import Tensor


@dataclass(frozen=True)
class LossInputs:
    """A micro-batch under the views of the inner update at hand.

    Attributes:
        logps: (rows, tokens), of the policy; differentiable.
        old: (rows, tokens), of the policy that sampled, in the same views.
        reference: (rows, tokens), of the reference model in the same views; None where beta is 0.
        advantages: (rows,).
        mask: (rows, tokens), 1 up to and including the first EOS.
    """

    logps: Tensor
    old: Tensor
    reference: Tensor | None
    advantages: Tensor
    mask: Tensor


# -> the loss, a scalar for one micro-batch, and metrics to log. The settings are those of the run, `DiffuGRPOConfig`.
Objective = Callable[[LossInputs, Any], tuple[Tensor, dict[str, float]]]


def reinforce(inputs: LossInputs, settings: Any) -> tuple[Tensor, dict[str, float]]:
    """-A log p, averaged over tokens: the policy gradient, with neither ratio, clipping nor KL (Williams 1992)."""
    total = (inputs.advantages.unsqueeze(1) * inputs.logps * inputs.mask).sum()
    return -total / inputs.mask.sum().clamp(min=1), {}


OBJECTIVES: dict[str, Objective] = {
    "reinforce": reinforce,
}
