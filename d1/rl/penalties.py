"""KL penalties, by name: what `beta` weighs. Pure functions of the same inputs as an objective.

Of log d = log p_reference - log p, k2 is (log d)^2 / 2 and k3 is d - log d - 1 (J. Schulman, Approximating KL
divergence, 2020). A new one is a function here and a line in `PENALTIES`.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import Tensor

from d1.rl.objectives import LossInputs, averaged

Penalty = Callable[[LossInputs, Any], Tensor]


def k3_of_views(inputs: LossInputs, reference: Tensor | None, settings: Any) -> Tensor:
    """k3 of each token in each view, summed with the views' weights; to `reference` (rows, views, tokens)."""
    assert reference is not None, "a penalty to the reference needs its log-probs, which beta > 0 asks for"
    log_d = reference - inputs.view_logps
    per_token = inputs.weights * (log_d.exp() - log_d - 1) * inputs.mask.unsqueeze(1)
    return averaged(per_token.sum((1, 2)), inputs, settings)


def k3(inputs: LossInputs, settings: Any) -> Tensor:
    """To the reference model. TRL's own with `--objective trl`, which takes k3 of the views' weighted sum."""
    return k3_of_views(inputs, inputs.view_reference, settings)


def k3_to_old(inputs: LossInputs, settings: Any) -> Tensor:
    """To the policy that sampled (TraceRL, arXiv 2509.06949)."""
    return k3_of_views(inputs, inputs.view_old, settings)


def k2_sequence(inputs: LossInputs, settings: Any) -> Tensor:
    """k2 of a completion's whole log-probability, to the reference model, over its length (ESPO, arXiv 2512.03759)."""
    assert inputs.reference is not None
    log_d = ((inputs.reference - inputs.logps) * inputs.mask).sum(-1)
    return (log_d**2 / 2 / inputs.lengths).mean()


PENALTIES: dict[str, Penalty] = {
    "k3": k3,
    "k3_to_old": k3_to_old,
    "k2_sequence": k2_sequence,
}
