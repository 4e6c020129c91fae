"""The losses of RL: pure functions of log-probabilities and advantages, by name.

`objective: trl`, the default, is TRL's own loss with all its `loss_type`s and `importance_sampling_level`s; d1's is
`loss_type: bnpo`. A new objective is a function and a row of `OBJECTIVES`, here or in a file of yours.

The divisor of a loss is part of a method and is named by `loss_type` (`MEANS` in `rows.py`). Divisors that count
tokens, views or rows count them over the whole rollout, so results do not depend on its split into micro-batches. There
are two exceptions, which count within a micro-batch as published: `bnpo`, TRL's and d1's, and the objective `rldf`.
"""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor

from d1.rl.rows import MEANS, LossInputs, Objective, known


def averaged(per_view: Tensor, inputs: LossInputs, settings: Any) -> Tensor:
    """The mean, named by `settings.loss_type`, of sums over tokens (rows, views). Raises ValueError for means that only
    TRL's loss has."""
    if settings.loss_type not in MEANS:
        raise ValueError(f"only TRL's loss has loss_type {settings.loss_type}: use one of {', '.join(MEANS)}")
    return MEANS[settings.loss_type](per_view, inputs, settings)


def reinforce(inputs: LossInputs, settings: Any) -> tuple[Tensor, dict[str, float]]:
    """-A log p: the policy gradient, without ratio and clipping (Williams 1992)."""
    per_row = -inputs.advantages * (inputs.logps * inputs.counted).sum(-1)
    return averaged(per_row.unsqueeze(1), inputs, settings), {}


def clip(ratios: Tensor, advantages: Tensor, settings: Any) -> tuple[Tensor, Tensor]:
    """PPO's min(r A, clip(r) A), and where clipping removes the gradient; `advantages` broadcasts to `ratios`.

    `settings.delta` also bounds the ratios above (dual clip, arXiv 1912.09729), which matters for negative advantages.
    """
    low = 1 - settings.epsilon
    high = 1 + (settings.epsilon if settings.epsilon_high is None else settings.epsilon_high)
    delta = math.inf if settings.delta is None else settings.delta
    gains = torch.min(ratios.clamp(max=delta) * advantages, ratios.clamp(low, high) * advantages)
    up = (ratios > min(high, delta)) & (advantages > 0)
    return gains, up | (((ratios < low) | (ratios > max(high, delta))) & (advantages < 0))


def share(what: Tensor, of: Tensor) -> dict[str, float]:
    """The metric of clipping: the share of the true elements of `of` where `what` is true, too."""
    return {"clip_ratio/region_mean": ((what & of).sum() / of.sum().clamp(min=1)).item()}


def clipped_views(inputs: LossInputs, settings: Any) -> tuple[Tensor, dict[str, float]]:
    """PPO's loss with one ratio per token per view; the views' losses are summed with their weights.

    TRL's loss gets a weighted sum of log-probs instead, where a weight becomes an exponent of the ratio.
    """
    ratios = (inputs.view_logps - known(inputs.view_old)).exp()
    gains, clipped = clip(ratios, inputs.advantages[:, None, None], settings)
    counted = inputs.weights * inputs.counted.unsqueeze(1)
    loss = averaged(-(counted * gains).sum(-1), inputs, settings)
    return loss, share(clipped, inputs.scored)


def clipped_steps(inputs: LossInputs, settings: Any) -> tuple[Tensor, dict[str, float]]:
    """PPO's loss with one ratio per view, that of the product of its tokens' probabilities; divided by the number of
    these tokens and averaged over all views (EGSPO, arXiv 2603.12554)."""
    scored = inputs.scored
    log_ratios = ((inputs.view_logps - known(inputs.view_old)) * scored).sum(-1)
    advantages = inputs.advantages.unsqueeze(1) if inputs.view_advantages is None else inputs.view_advantages
    gains, clipped = clip(log_ratios.exp(), advantages, settings)
    per_token = gains * scored.any(-1) / scored.sum(-1).clamp(min=1)
    return -per_token.sum() / inputs.scoring_views, share(clipped, scored.any(-1))


def clipped_sequences(inputs: LossInputs, settings: Any) -> tuple[Tensor, dict[str, float]]:
    """PPO's loss with one ratio per completion, exp(bound - old bound), not divided by the length (EBPO, of LLaDA2.1).
    Clipping is done on logarithms, so that a clipped ratio cannot overflow."""
    log_ratios = ((inputs.logps - inputs.old) * inputs.mask).sum(-1)
    positive = inputs.advantages >= 0
    high = math.log1p(settings.epsilon if settings.epsilon_high is None else settings.epsilon_high)
    low = math.log1p(-settings.epsilon) if settings.epsilon < 1 else -math.inf
    held = torch.where(positive, log_ratios.clamp(max=high), log_ratios.clamp(min=low))
    clipped, taking_part = (held != log_ratios) & (inputs.advantages != 0), inputs.mask.bool().any(-1)
    return -(inputs.advantages * held.exp() * taking_part).mean(), share(clipped, taking_part)


def draws_log_ratios(inputs: LossInputs) -> Tensor:
    """(rows, draws) log-ratio of each draw's bound to the old policy's, divided by the completion's length."""
    difference = inputs.weights * (inputs.view_logps - known(inputs.view_old)) * inputs.mask.unsqueeze(1)
    per_draw = inputs.by_draw(difference)
    return per_draw.shape[1] * per_draw / inputs.lengths.unsqueeze(1)  # weights are divided by the number of draws


def bgpo(inputs: LossInputs, settings: Any) -> tuple[Tensor, dict[str, float]]:
    """BGPO's loss, a sum over draws (arXiv 2510.11683, section 3). d is a draw's log-ratio of bounds per token.

    The ratio exp(d) is replaced by its lower bound 1 + d if A > 0, and kept if A <= 0.
    """
    per_draw, advantages = draws_log_ratios(inputs), inputs.advantages.unsqueeze(1)
    gains, clipped = clip(torch.where(advantages > 0, 1 + per_draw, per_draw.exp()), advantages, settings)
    taking_part = inputs.mask.bool().any(1, keepdim=True).expand_as(clipped)
    return -(gains * taking_part).mean(), share(clipped, taking_part)


def gdsd(inputs: LossInputs, settings: Any) -> tuple[Tensor, dict[str, float]]:
    """Squared distance of each draw's clamped log-ratio per token to 10 A, summed over draws (GDSD, arXiv 2605.29398).

    As in the published code, the log-ratio of the whole completion is clamped at log(1 +- epsilon), and the target lies
    far outside. So the gradient is that of -20 A log p / L inside the clamp, up to a millionth, and 0 outside.
    """
    per_draw = draws_log_ratios(inputs) * inputs.lengths.unsqueeze(1)
    held = per_draw.clamp(math.log1p(-settings.epsilon), math.log1p(settings.epsilon))
    taking_part = inputs.mask.bool().any(1, keepdim=True).expand_as(held)
    distance = held / inputs.lengths.unsqueeze(1) - 10 * inputs.advantages.unsqueeze(1)
    return (distance**2 * taking_part).sum(1).mean(), share(held != per_draw, taking_part)


def likely(inputs: LossInputs) -> Tensor:
    """(rows, views, tokens) bool: the scored tokens that the view's step revealed, and those to which the current
    policy gives a probability of at least 0.6 (RLDF)."""
    if inputs.reveal_steps is None:
        raise ValueError("reveal_steps is missing: a view reveals the tokens of its first step")
    scored = inputs.scored
    steps = inputs.reveal_steps.unsqueeze(1).expand_as(scored)
    first = steps.masked_fill(~scored, torch.iinfo(steps.dtype).max).amin(-1, keepdim=True)
    return scored & ((steps == first) | (inputs.view_logps.detach() >= math.log(0.6)))


def mean_of_states(values: Tensor, counts: Tensor) -> Tensor:
    """The mean of `values` (rows, views, tokens) where `counts` is true: first per view, over the tokens of all rows of
    the micro-batch, then over the views."""
    return ((values * counts).sum((0, 2)) / counts.sum((0, 2)).clamp(min=1)).mean()


def rldf(inputs: LossInputs, settings: Any) -> tuple[Tensor, dict[str, float]]:
    """-A log p of the `likely` tokens in a few states of the rollout; the mean per state, then over states (RLDF)."""
    counts = likely(inputs)
    loss = mean_of_states(-inputs.advantages[:, None, None] * inputs.view_logps, counts)
    return loss, {"likely": (counts.sum() / inputs.scored.sum().clamp(min=1)).item()}


def evidence_bounds(inputs: LossInputs, eubo_beta: float) -> tuple[Tensor, Tensor]:
    """SPG's two estimates of the log-probability per token, (rows,) each (arXiv 2510.09541, section 3).

    The first is the weighted sum over views. The second, with beta = `eubo_beta` and t_v the share of a row's
    tokens that view v hides, is the mean over hidden tokens k of 1/beta log(mean over v of p_k(v)^beta [hidden] / t_v).

    With masks of a single block, the mean of the first over draws is a lower bound. The second is an upper bound only
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
    """(rows,) SPG's bound: the lower one if A > 0, else a mixture with share `settings.eubo_share` of the upper one."""
    lower, upper = evidence_bounds(inputs, settings.eubo_beta)
    mixed = settings.eubo_share * upper + (1 - settings.eubo_share) * lower
    return torch.where(inputs.advantages > 0, lower, mixed)


def spg(inputs: LossInputs, settings: Any) -> tuple[Tensor, dict[str, float]]:
    """-A x bound, each row weighted by its length (SPG, arXiv 2510.09541, section 3)."""
    per_row = -inputs.advantages * sandwiched(inputs, settings) * inputs.lengths
    return averaged(per_row.unsqueeze(1), inputs, settings), {}


def sequence_log_ratios(inputs: LossInputs) -> Tensor:
    """(rows,) the estimator's log-ratio of a completion's new to old probability; without gradients."""
    return ((inputs.logps - inputs.old) * inputs.mask).sum(-1).detach()


def stable_drl(inputs: LossInputs, settings: Any) -> tuple[Tensor, dict[str, float]]:
    """-sum of w A x SPG's bound over a prompt's completions, where w is the softmax of their capped log-ratios;
    averaged over prompts (StableDRL)."""
    most = math.log(settings.ratio_cap)
    own = sequence_log_ratios(inputs).clamp(max=most)
    group = torch.zeros_like(own).unsqueeze(1) if inputs.log_ratios is None else inputs.log_ratios.clamp(max=most)
    weights = (own - group.logsumexp(1)).exp() * group.shape[1]  # 1 on average, because the loss is a mean over rows
    loss = -(weights * inputs.advantages * sandwiched(inputs, settings)).mean()
    return loss, {"weight_max": weights.max().item()}


CLIP, BOUND = ("epsilon", "epsilon_high", "delta"), ("eubo_beta", "eubo_share")
TRLS_MEANS, ROW_MEANS = ("grpo", "bnpo", "dr_grpo", "dapo"), ("sum", "grpo", "dr_grpo", "bnpo", "dapo", "active")
OBJECTIVES: dict[str, Objective] = {
    "trl": Objective(
        None,
        loss_types=(*TRLS_MEANS, "luspo", "cispo", "sapo", "vespo"),
        own_kl="k3",
        settings=(
            *("loss_type", *CLIP, "sampling_weight_cap", "importance_sampling_level", "top_entropy_quantile"),
            *("entropy_coef", "use_adaptive_entropy", "off_policy_mask_threshold"),
        ),
        idle=CLIP,
    ),
    "reinforce": Objective(
        reinforce, reads_old=False, loss_types=ROW_MEANS, settings=("loss_type", "sampling_weight_cap")
    ),
    "clipped_views": Objective(
        clipped_views, per_view=True, by_view=True, settings=("loss_type", *CLIP, "sampling_weight_cap"), idle=CLIP
    ),
    "clipped_steps": Objective(clipped_steps, per_view=True, by_view=True, settings=(*CLIP, "state_reward"), idle=CLIP),
    "clipped_sequences": Objective(clipped_sequences, settings=CLIP[:2], idle=CLIP[:2]),
    "bgpo": Objective(bgpo, per_view=True, per_draw=True, settings=CLIP, idle=CLIP),
    "gdsd": Objective(gdsd, per_view=True, per_draw=True, settings=("epsilon",), idle=("epsilon",)),
    "rldf": Objective(rldf, reads_old=False, per_view=True, by_view=True, reads_steps=True, settings=()),
    "spg": Objective(
        spg, reads_old=False, per_view=True, linear=False, loss_types=ROW_MEANS, settings=("loss_type", *BOUND)
    ),
    "stable_drl": Objective(
        stable_drl, over_group=True, per_view=True, linear=False, settings=(*BOUND, "ratio_cap"), idle=("ratio_cap",)
    ),
}
