"""KL penalties, named by `kl` and weighed by `beta`: pure functions of log-probabilities.

With log d = log p_reference - log p, k2 is (log d)^2 / 2 and k3 is d - log d - 1 (J. Schulman, Approximating KL
divergence, 2020). A new penalty is a function and a row of `PENALTIES`, here or in a file of yours.
"""

from __future__ import annotations

from typing import Any

from torch import Tensor

from d1.rl.objectives import averaged, likely, mean_of_states
from d1.rl.rows import LossInputs, Penalty, known


def k3_of(log_d: Tensor) -> Tensor:
    return log_d.exp() - log_d - 1


def k3(inputs: LossInputs, settings: Any) -> Tensor:
    """k3 of each token in each view, summed with the views' weights. With `--objective trl` the penalty is TRL's own
    instead, k3 of the views' weighted sum."""
    per_token = k3_of(known(inputs.view_reference) - inputs.view_logps)
    return averaged((inputs.weights * per_token * inputs.mask.unsqueeze(1)).sum(-1), inputs, settings)


def k3_to_old(inputs: LossInputs, settings: Any) -> Tensor:
    """k3 to the policy that sampled: summed over a view's tokens, averaged over views (TraceRL, arXiv 2509.06949)."""
    per_token = k3_of(known(inputs.view_old) - inputs.view_logps)
    return (per_token * inputs.scored).sum() / inputs.scoring_views


def k3_steps(inputs: LossInputs, settings: Any) -> Tensor:
    """k3 of the product of a view's probabilities, divided by its number of tokens; averaged over views (EGSPO)."""
    scored = inputs.scored
    log_d = ((known(inputs.view_reference) - inputs.view_logps) * scored).sum(-1)
    return (k3_of(log_d) * scored.any(-1) / scored.sum(-1).clamp(min=1)).sum() / inputs.scoring_views


def k3_likely(inputs: LossInputs, settings: Any) -> Tensor:
    """k3 of each `likely` token, averaged like the objective `rldf` (RLDF)."""
    return mean_of_states(k3_of(known(inputs.view_reference) - inputs.view_logps), likely(inputs))


def k2_sequence(inputs: LossInputs, settings: Any) -> Tensor:
    """k2 of a completion's whole log-probability, divided by its length (ESPO, arXiv 2512.03759)."""
    log_d = ((known(inputs.reference) - inputs.logps) * inputs.mask).sum(-1)
    return (log_d**2 / 2 / inputs.lengths).mean()


def k2_draws(inputs: LossInputs, settings: Any) -> Tensor:
    """k2 of each draw's whole log-probability, divided by the completion's length; averaged over draws (GDSD)."""
    difference = inputs.weights * (known(inputs.view_reference) - inputs.view_logps) * inputs.mask.unsqueeze(1)
    log_d = inputs.by_draw(difference)
    log_d = log_d.shape[1] * log_d
    return (log_d**2 / 2 / inputs.lengths.unsqueeze(1)).mean()


PENALTIES: dict[str, Penalty] = {
    "k3": Penalty(k3, settings=("loss_type",), by_view=True),
    "k3_to_old": Penalty(k3_to_old, to="old", settings=(), by_view=True),
    "k3_steps": Penalty(k3_steps, settings=(), by_view=True),
    "k3_likely": Penalty(k3_likely, settings=(), by_view=True, reads_steps=True),
    "k2_sequence": Penalty(k2_sequence, settings=()),
    "k2_draws": Penalty(k2_draws, settings=()),
}
