"""KL penalties, by name: what `beta` weighs. Pure functions of the same inputs as an objective.

Of log d = log p_reference - log p, k2 is (log d)^2 / 2 and k3 is d - log d - 1 (J. Schulman, Approximating KL
divergence, 2020). A new one is a function and a row of `PENALTIES`.
"""

from __future__ import annotations

from torch import Tensor

from d1.rl.objectives import averaged
from d1.rl.rows import LossInputs, LossSettings, Penalty, known


def k3_of_views(inputs: LossInputs, reference: Tensor | None, settings: LossSettings) -> Tensor:
    """k3 of each token in each view, summed with the views' weights; to `reference` (rows, views, tokens)."""
    log_d = known(reference) - inputs.view_logps
    per_token = inputs.weights * (log_d.exp() - log_d - 1) * inputs.mask.unsqueeze(1)
    return averaged(per_token.sum((1, 2)), inputs, settings)


def k3(inputs: LossInputs, settings: LossSettings) -> Tensor:
    """To the reference model. TRL's own with `--objective trl`, which takes k3 of the views' weighted sum."""
    return k3_of_views(inputs, inputs.view_reference, settings)


def k3_to_old(inputs: LossInputs, settings: LossSettings) -> Tensor:
    """To the policy that sampled (TraceRL, arXiv 2509.06949)."""
    return k3_of_views(inputs, inputs.view_old, settings)


def k2_sequence(inputs: LossInputs, settings: LossSettings) -> Tensor:
    """k2 of a completion's whole log-probability, to the reference model, over its length (ESPO, arXiv 2512.03759)."""
    log_d = ((known(inputs.reference) - inputs.logps) * inputs.mask).sum(-1)
    return (log_d**2 / 2 / inputs.lengths).mean()


PENALTIES: dict[str, Penalty] = {
    "k3": Penalty(k3, settings=("loss_type",)),
    "k3_to_old": Penalty(k3_to_old, to="old", settings=("loss_type",)),
    "k2_sequence": Penalty(k2_sequence, settings=()),
}
