"""What RL minimises: pure functions of log-probabilities and advantages.

`objective: trl`, the default, is TRL's own loss with all its `loss_type`s and `importance_sampling_level`s; d1's is
`loss_type: bnpo`. `kl` names a penalty, which `beta` weighs: with log d = log p_reference - log p, k2 is (log d)^2 / 2
and k3 is d - log d - 1 (J. Schulman, Approximating KL divergence, 2020). `advantage` says what becomes of TRL's, which
are rewards less their group's mean, over `scale_rewards`. A new objective, penalty or advantage is a function and a row
of `OBJECTIVES`, `PENALTIES` or `ADVANTAGES`, here or in a file of yours.
"""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor

from d1.rl.rows import MEANS, Advantage, LossInputs, Objective, Penalty, known


def averaged(per_row: Tensor, inputs: LossInputs, settings: Any) -> Tensor:
    """The mean that `settings.loss_type` names, of sums over tokens (rows,). Raises ValueError for TRL's other ones."""
    if settings.loss_type not in MEANS:
        raise ValueError(f"loss_type {settings.loss_type} is known to TRL's loss alone: take one of {', '.join(MEANS)}")
    return MEANS[settings.loss_type](per_row, inputs, settings)


def reinforce(inputs: LossInputs, settings: Any) -> tuple[Tensor, dict[str, float]]:
    """-A log p: the policy gradient, with neither ratio nor clipping (Williams 1992)."""
    return averaged(-inputs.advantages * (inputs.logps * inputs.counted).sum(-1), inputs, settings), {}


def clip(ratios: Tensor, advantages: Tensor, settings: Any) -> tuple[Tensor, Tensor]:
    """PPO's min(r A, clip(r) A), and where the clip holds a gradient back; `advantages` broadcasts to `ratios`."""
    low = 1 - settings.epsilon
    high = 1 + (settings.epsilon if settings.epsilon_high is None else settings.epsilon_high)
    clipped = ((ratios < low) & (advantages < 0)) | ((ratios > high) & (advantages > 0))
    return torch.min(ratios * advantages, ratios.clamp(low, high) * advantages), clipped


def share(what: Tensor, of: Tensor) -> float:
    """The share of the true places of `of` at which `what` is true, too."""
    return ((what & of).sum() / of.sum().clamp(min=1)).item()


def clipped_views(inputs: LossInputs, settings: Any) -> tuple[Tensor, dict[str, float]]:
    """PPO's loss with a ratio for each token in each view, the views' losses summed with their weights.

    In a weighted sum of log-probs, as TRL's loss gets it, a weight would be an exponent of the ratio.
    """
    ratios = (inputs.view_logps - known(inputs.view_old)).exp()
    gains, clipped = clip(ratios, inputs.advantages[:, None, None], settings)
    scored = (inputs.weights * inputs.mask.unsqueeze(1)) != 0
    counted = inputs.weights * inputs.counted.unsqueeze(1)
    loss = averaged(-(counted * gains).sum((1, 2)), inputs, settings)
    return loss, {"clip_ratio/region_mean": share(clipped, scored)}


def bgpo(inputs: LossInputs, settings: Any) -> tuple[Tensor, dict[str, float]]:
    """BGPO's loss, a sum over draws (arXiv 2510.11683, section 3): d is a draw's log-ratio of bounds, a token.

    exp(d) is bounded below by 1 + d where A > 0, and stands itself where A <= 0.
    """
    views = inputs.weights.shape[1]
    difference = inputs.weights * (inputs.view_logps - known(inputs.view_old)) * inputs.mask.unsqueeze(1)
    per_draw = views * difference.sum(-1) / inputs.lengths.unsqueeze(1)
    advantages = inputs.advantages.unsqueeze(1)
    gains, clipped = clip(torch.where(advantages > 0, 1 + per_draw, per_draw.exp()), advantages, settings)
    taking_part = inputs.mask.bool().any(1, keepdim=True).expand_as(clipped)
    return -(gains * taking_part).mean(), {"clip_ratio/region_mean": share(clipped, taking_part)}


def evidence_bounds(inputs: LossInputs, eubo_beta: float) -> tuple[Tensor, Tensor]:
    """SPG's two forms, (rows,) each, log-probability per token (arXiv 2510.09541, section 3).

    The first is the weighted sum over views. The second, with beta = `eubo_beta` and t_v the share of a row's
    tokens that view v hides, is the mean over hidden tokens k of 1/beta log(mean over v of p_k(v)^beta [hidden] / t_v).

    With masks of a single block the first bounds from below, in the mean over draws, and the second from above, only
    for beta >= the completion's length and many draws. With several blocks neither is a bound.
    """
    hidden = inputs.weights != 0
    shares = hidden.sum(-1) / inputs.lengths.unsqueeze(1)
    powers = eubo_beta * inputs.view_logps - shares.clamp(min=1e-12).log().unsqueeze(-1)
    met = hidden.any(1)
    joined = torch.where(hidden, powers, -torch.inf).masked_fill(~met.unsqueeze(1), 0.0).logsumexp(1)
    joined = (joined - math.log(hidden.shape[1])) / eubo_beta
    upper = joined.masked_fill(~met, 0.0).sum(-1) / met.sum(-1).clamp(min=1)
    return inputs.logps.sum(-1), upper


def sandwiched(inputs: LossInputs, settings: Any) -> Tensor:
    """(rows,) SPG's bound: from below what is to become likelier, `settings.eubo_share` from above what is not to."""
    lower, upper = evidence_bounds(inputs, settings.eubo_beta)
    mixed = settings.eubo_share * upper + (1 - settings.eubo_share) * lower
    return torch.where(inputs.advantages > 0, lower, mixed)


def spg(inputs: LossInputs, settings: Any) -> tuple[Tensor, dict[str, float]]:
    """-A x bound, each row weighted by its length (SPG, arXiv 2510.09541, section 3)."""
    return averaged(-inputs.advantages * sandwiched(inputs, settings) * inputs.lengths, inputs, settings), {}


def sequence_log_ratios(inputs: LossInputs) -> Tensor:
    """(rows,) log-ratio of a completion's probabilities, new to old, as the estimator has it; without gradients."""
    return ((inputs.logps - inputs.old) * inputs.mask).sum(-1).detach()


def stable_drl(inputs: LossInputs, settings: Any) -> tuple[Tensor, dict[str, float]]:
    """-sum of w A x SPG's bound, w the capped ratios of the whole rollout, made to sum to 1 (StableDRL)."""
    own = sequence_log_ratios(inputs).clamp(max=math.log(settings.ratio_cap))
    everyone = own if inputs.log_ratios is None else inputs.log_ratios.clamp(max=math.log(settings.ratio_cap))
    weights = (own - everyone.logsumexp(0)).exp()
    micro_batches = len(everyone) / len(own)  # the step's loss is their mean and is to be the sum
    loss = -(weights * inputs.advantages * sandwiched(inputs, settings)).sum() * micro_batches
    return loss, {"weight_max": weights.max().item() * len(everyone)}


def k3_of_views(inputs: LossInputs, reference: Tensor | None, settings: Any) -> Tensor:
    """k3 of each token in each view, summed with the views' weights; to `reference` (rows, views, tokens)."""
    log_d = known(reference) - inputs.view_logps
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
    log_d = ((known(inputs.reference) - inputs.logps) * inputs.mask).sum(-1)
    return (log_d**2 / 2 / inputs.lengths).mean()


def leave_one_out(advantages: Tensor) -> Tensor:
    """A reward less the mean of the others in its group (RLOO, arXiv 2402.14740)."""
    generations = advantages.shape[1]
    return advantages * generations / (generations - 1)


def signed_softmax(advantages: Tensor) -> Tensor:
    """softmax(A) - softmax(-A) over the group (wd1, arXiv 2507.08838, section 3), times its size: the loss is a mean
    over rows, and wd1's is a mean over groups of sums."""
    return (advantages.softmax(1) - (-advantages).softmax(1)) * advantages.shape[1]


CLIP, BOUND = ("epsilon", "epsilon_high"), ("eubo_beta", "eubo_share")
OBJECTIVES: dict[str, Objective] = {
    "trl": Objective(
        None,
        loss_types=("grpo", "bnpo", "dr_grpo", "dapo", "luspo", "cispo", "sapo", "vespo"),
        own_kl="k3",
        settings=(
            *("loss_type", *CLIP, "sampling_weight_cap", "importance_sampling_level", "delta", "top_entropy_quantile"),
            *("entropy_coef", "use_adaptive_entropy", "off_policy_mask_threshold"),
        ),
    ),
    "reinforce": Objective(reinforce, reads_old=False, settings=("loss_type", "sampling_weight_cap")),
    "clipped_views": Objective(clipped_views, per_view=True, settings=("loss_type", *CLIP, "sampling_weight_cap")),
    "bgpo": Objective(bgpo, per_view=True, per_draw=True, settings=CLIP),
    "spg": Objective(spg, reads_old=False, per_view=True, linear=False, settings=("loss_type", *BOUND)),
    "stable_drl": Objective(
        stable_drl, over_all_rows=True, per_view=True, linear=False, settings=(*BOUND, "ratio_cap")
    ),
}
PENALTIES: dict[str, Penalty] = {
    "k3": Penalty(k3, settings=("loss_type",)),
    "k3_to_old": Penalty(k3_to_old, to="old", settings=("loss_type",)),
    "k2_sequence": Penalty(k2_sequence, settings=()),
}
ADVANTAGES: dict[str, Advantage] = {
    "trl": Advantage(None, centred=False),
    "leave_one_out": Advantage(leave_one_out),
    "signed_softmax": Advantage(signed_softmax),
}
