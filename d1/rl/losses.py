"""The losses of RL: pure functions in literal tables of objectives, KL penalties and advantages.

From top to bottom: the inputs of a loss; means; entries of the tables, which say what a function reads and needs;
objectives, KL penalties and advantages. A new one is a function and an entry, here or in a file of yours.

Shapes end a tensor's name where it has several dimensions: R rows, V views, T tokens of the canvas, D draws. The name
`logps_RVT` is (rows, views, tokens).
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor

from d1.scoring.estimators import called, described

# --- Inputs -----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class LossInputs:
    """A micro-batch under the views of the current update.

    Attributes:
        view_logps: (rows, views, tokens), log-probabilities of the policy; 0 where a view does not score a token.
            Differentiable.
        view_old: (rows, views, tokens), those of the policy that sampled, in the same views; None unless the objective
            reads them (`Objective.reads_old`) or the penalty compares with them.
        view_reference: (rows, views, tokens), those of the reference model, in the same views; None unless the penalty
            compares with them.
        weights: (rows, views, tokens), the weight of each view for each token (`d1.scoring.Views`).
        advantages: (rows,).
        mask: (rows, tokens), 1 for tokens that count in the loss: by default up to and including the first EOS.
        tokens: scored tokens per micro-batch, averaged over the whole rollout and all processes.
        views: views of this update that score something, averaged in the same way; None: those of this micro-batch.
        pairs: tokens that views of this update score, each as often as it is scored, averaged in the same way; None:
            those of this micro-batch.
        repeats: tokens that count, each once per view of this update that scores something of its row, averaged in the
            same way; None: those of this micro-batch.
        active: completions whose advantage is not 0, averaged in the same way; None: the rows of this micro-batch.
        views_per_draw: `Estimator.views_per_draw`, where 0 means that all views are one draw.
        reveal_steps: (rows, tokens), the step that revealed each token; in a block-causal model, counted from the first
            step of its block.
        view_advantages: (rows, views), the advantage of each view's state; None without `state_reward`.
        log_ratios: (rows, completions per prompt), `sequence_log_ratios` of the rows of each row's prompt, under the
            policy before this update; None unless `Objective.over_group`.
        sampling_weights: (rows, tokens), the weight of each token in the policy gradient (`truncated_weights`); None
            if `sampling_weight_cap` is None.
        turns: rows per completion: the turns of an episode are rows, with empty ones for an episode with fewer turns.
    """

    view_logps: Tensor
    view_old: Tensor | None
    view_reference: Tensor | None
    weights: Tensor
    advantages: Tensor
    mask: Tensor
    tokens: Tensor
    views: Tensor | None = None
    pairs: Tensor | None = None
    repeats: Tensor | None = None
    active: Tensor | None = None
    views_per_draw: int = 1
    reveal_steps: Tensor | None = None
    view_advantages: Tensor | None = None
    log_ratios: Tensor | None = None
    sampling_weights: Tensor | None = None
    turns: int = 1

    def __post_init__(self) -> None:
        if self.weights.shape != self.view_logps.shape:
            raise ValueError(f"weights must be {tuple(self.view_logps.shape)}, got {tuple(self.weights.shape)}")

    @property
    def logps(self) -> Tensor:
        """(rows, tokens), the estimated log-probabilities of the policy."""
        return (self.weights * self.view_logps).sum(1)

    @property
    def old(self) -> Tensor:
        """(rows, tokens), those of the policy that sampled."""
        return (self.weights * known(self.view_old)).sum(1)

    @property
    def reference(self) -> Tensor | None:
        """(rows, tokens), those of the reference model."""
        return None if self.view_reference is None else (self.weights * self.view_reference).sum(1)

    @property
    def counted(self) -> Tensor:
        """(rows, tokens), each token's weight in the policy gradient: `mask`, times the sampling weights if any."""
        return self.mask if self.sampling_weights is None else self.mask * self.sampling_weights

    @property
    def scored(self) -> Tensor:
        """(rows, views, tokens) bool, whether a view scores a token."""
        return (self.weights * self.mask.unsqueeze(1)) != 0

    @property
    def scoring_views(self) -> Tensor:
        """Views that score something, per micro-batch, averaged over the rollout."""
        return self.scored.any(-1).sum().clamp(min=1) if self.views is None else self.views

    @property
    def scored_pairs(self) -> Tensor:
        """Tokens that views score, per micro-batch, averaged over the rollout."""
        return self.scored.sum().clamp(min=1) if self.pairs is None else self.pairs

    @property
    def repeated_tokens(self) -> Tensor:
        """Tokens that count, once per view that scores something of their row, per micro-batch, averaged over the
        rollout."""
        if self.repeats is not None:
            return self.repeats
        return (self.scored.any(-1).sum(1) * self.mask.sum(1)).sum().clamp(min=1)

    @property
    def active_rows(self) -> Tensor:
        """Completions in the loss whose advantage is not 0, per micro-batch, averaged over the rollout."""
        active = self.advantages.ne(0) & self.mask.bool().any(-1)
        return active.sum().clamp(min=1) if self.active is None else self.active

    @property
    def lengths(self) -> Tensor:
        """(rows,), number of scored tokens; at least 1, because it is a divisor."""
        return self.mask.sum(-1).clamp(min=1)

    def by_draw(self, values: Tensor) -> Tensor:
        """(rows, draws), sums of `values` (rows, views, tokens) over the tokens and views of each draw."""
        # The views of a draw are `draws` apart: view v belongs to draw v modulo the number of draws.
        return values.sum(-1).unflatten(1, (self.views_per_draw or values.shape[1], -1)).sum(1)


def known(view_logps: Tensor | None) -> Tensor:
    """Old or reference log-probabilities, which are there if the entry in use asked for them (else ValueError)."""
    if view_logps is None:
        raise ValueError("these log-probs are not scored: an entry needs reads_old=True, to='old' or to='reference'")
    return view_logps


# --- Means: the divisor of a loss, named by `loss_type` ---------------------------------------------------------------
#
# Divisors that count tokens, views or rows count them over the whole rollout, so results do not depend on its split
# into micro-batches. Two exceptions count within a micro-batch, as published: `bnpo`, TRL's and d1's, and the objective
# `rldf` with its penalty `k3_likely`.


def mean_of_views(sums_RV: Tensor, inputs: LossInputs, settings: Any) -> Tensor:
    """The weighted mean over the tokens of a view, then the mean over all views that score something."""
    weights_RV = (inputs.weights * inputs.mask.unsqueeze(1)).sum(-1)
    return (sums_RV / weights_RV.where(weights_RV != 0, 1.0)).sum() / inputs.scoring_views


# Means of sums over tokens, (rows, views). `sum`, `active`, `scored`, `rounds` and `views` are ours, the others TRL's.
# Those over rows are means over completions: an episode's turns are added up.
MEANS: dict[str, Callable[[Tensor, LossInputs, Any], Tensor]] = {
    "sum": lambda sums_RV, inputs, settings: sums_RV.sum(1).mean() * inputs.turns,
    "grpo": lambda sums_RV, inputs, settings: (sums_RV.sum(1) / inputs.lengths).mean() * inputs.turns,
    "bnpo": lambda sums_RV, inputs, settings: sums_RV.sum() / inputs.mask.sum().clamp(min=1),
    "dapo": lambda sums_RV, inputs, settings: sums_RV.sum() / inputs.tokens,
    "active": lambda sums_RV, inputs, settings: sums_RV.sum() / (inputs.active_rows * settings.max_completion_length),
    "scored": lambda sums_RV, inputs, settings: sums_RV.sum() / inputs.scored_pairs,
    "rounds": lambda sums_RV, inputs, settings: sums_RV.sum() * settings.block_length / inputs.repeated_tokens,
    "views": mean_of_views,
}


def averaged(sums_RV: Tensor, inputs: LossInputs, settings: Any) -> Tensor:
    """The mean that `settings.loss_type` names."""
    return MEANS[settings.loss_type](sums_RV, inputs, settings)


# --- Entries of the tables --------------------------------------------------------------------------------------------
#
# An entry is called like its function and checks the returned value, so that a mistake in a user's function is one
# line. The checks of combinations, the scoring and the plan of a run read the entries, so users' entries are treated
# like the others.

Loss = tuple[Tensor, dict[str, float]]  # of one micro-batch, a scalar; and metrics to log, of this process's rows


@dataclass(frozen=True)
class Objective:
    """An entry of the table: the loss, and what it needs.

    Attributes:
        loss: returns the loss of one micro-batch, a scalar, and metrics to log, of this process's rows. The loss of a
            step is the mean over its micro-batches. None is TRL's own loss.
        reads_old: it reads log-probabilities of the policy that sampled; if False, these are not scored.
        over_group: it weighs a row against the others of its prompt and reads `LossInputs.log_ratios`.
        per_view: it uses each view's log-probabilities, not only their weighted sums.
        per_draw: it uses each draw as an estimate of the whole completion (`Estimator.views_per_draw`).
        by_view: its mean is over views, so that the views can be divided among the updates (`split_views`).
        per_row: it has one ratio or one bound per row, which must be a whole completion: no turn of an episode.
        linear: it uses log-probabilities; False: bounds computed from means over hidden tokens (`Estimator.linear`).
        reads_steps: it reads `LossInputs.reveal_steps`, so that each token must have been revealed once and kept.
        loss_types: the values of `loss_type` that it accepts.
        own_kl: the penalty that the loss adds itself.
        settings: the settings that it reads (`epsilon`, `loss_type`, ...); setting another one is an error. None:
            unknown.
        idle: the settings that do nothing as long as the policy is the one that sampled.
    """

    loss: Callable[[LossInputs, Any], Loss] | None
    reads_old: bool = True
    over_group: bool = False
    per_view: bool = False
    per_draw: bool = False
    by_view: bool = False
    per_row: bool = False
    linear: bool = True
    reads_steps: bool = False
    loss_types: tuple[str, ...] = tuple(MEANS)
    own_kl: str | None = None
    settings: tuple[str, ...] | None = None
    idle: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        if self.over_group and not self.reads_old:
            raise ValueError("an Objective with over_group compares with the old policy: it needs reads_old=True")

    def __call__(self, inputs: LossInputs, settings: Any) -> Loss:
        """The loss and its metrics. Raises ValueError if the function returned something else."""
        assert self.loss is not None
        returned = self.loss(inputs, settings)
        if not isinstance(returned, tuple) or len(returned) != 2 or not isinstance(returned[1], dict):
            raise ValueError(f"{called(self.loss)} returned {described(returned)}: expected a pair (loss, metrics)")
        checked_scalar(self.loss, returned[0], inputs)
        for name, value in returned[1].items():
            if not isinstance(value, int | float):
                raise ValueError(f"{called(self.loss)} gave the metric {name!r}: {described(value)}, expected a number")
        return returned


@dataclass(frozen=True)
class Penalty:
    """An entry of the table of KL penalties.

    Attributes:
        value: returns the penalty of one micro-batch, a scalar.
        to: whose log-probabilities it compares with the policy's. "reference" needs a reference model.
        settings, by_view, per_row, reads_steps: as in `Objective`.
    """

    value: Callable[[LossInputs, Any], Tensor]
    to: Literal["reference", "old"] = "reference"
    settings: tuple[str, ...] | None = None
    by_view: bool = False
    per_row: bool = False
    reads_steps: bool = False

    def __call__(self, inputs: LossInputs, settings: Any) -> Tensor:
        """The penalty. Raises ValueError if the function did not return a scalar with a gradient."""
        return checked_scalar(self.value, self.value(inputs, settings), inputs)


@dataclass(frozen=True)
class Advantage:
    """An entry of the table of advantages.

    Attributes:
        of: TRL's advantages (groups, completions per prompt) -> the same shape. None leaves them as they are.
        centred: it needs rewards minus their group's mean, so `scale_rewards` must be "none".
    """

    of: Callable[[Tensor], Tensor] | None
    centred: bool = True

    def __call__(self, groups: Tensor) -> Tensor:
        """The advantages. Raises ValueError if the function returned something else."""
        assert self.of is not None
        returned = self.of(groups)
        if not isinstance(returned, Tensor) or returned.shape != groups.shape or not returned.is_floating_point():
            expected = f"floats of shape {tuple(groups.shape)}"
            raise ValueError(f"{called(self.of)} returned {described(returned)}: expected {expected}")
        return returned


def checked_scalar(function: object, value: Any, inputs: LossInputs) -> Tensor:
    """Raises ValueError unless a function returned a scalar, with a gradient if the policy's log-probs have one."""
    if isinstance(value, Tensor) and value.dim() == 0 and value.requires_grad >= inputs.view_logps.requires_grad:
        return value
    raise ValueError(f"{called(function)} returned {described(value)}: expected a scalar tensor with a gradient")


# --- Objectives -------------------------------------------------------------------------------------------------------
#
# `objective: trl`, the default, is TRL's own loss with all its `loss_type`s and `importance_sampling_level`s; d1's is
# `loss_type: bnpo`. In the equations, p is the policy, A the advantage and r a ratio of p to the old policy.


def reinforce(inputs: LossInputs, settings: Any) -> Loss:
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
    """The metric of clipping: the share of the elements of `of` that are also in `what`, both bool."""
    return {"clip_ratio/region_mean": ((what & of).sum() / of.sum().clamp(min=1)).item()}


def clipped_views(inputs: LossInputs, settings: Any) -> Loss:
    """PPO's loss with one ratio per token per view; the views' losses are summed with their weights.

    TRL's loss gets a weighted sum of log-probs instead, where a weight becomes an exponent of the ratio.
    """
    ratios_RVT = (inputs.view_logps - known(inputs.view_old)).exp()
    gains_RVT, clipped_RVT = clip(ratios_RVT, inputs.advantages[:, None, None], settings)
    counted_RVT = inputs.weights * inputs.counted.unsqueeze(1)
    loss = averaged(-(counted_RVT * gains_RVT).sum(-1), inputs, settings)
    return loss, share(clipped_RVT, inputs.scored)


def clipped_steps(inputs: LossInputs, settings: Any) -> Loss:
    """PPO's loss with one ratio per view, that of the product of its tokens' probabilities; divided by the number of
    these tokens and averaged over all views (EGSPO, arXiv 2603.12554)."""
    scored_RVT = inputs.scored
    # log r of a view = sum over its tokens of log p - log p_old
    log_ratios_RV = ((inputs.view_logps - known(inputs.view_old)) * scored_RVT).sum(-1)
    advantages_RV = inputs.advantages.unsqueeze(1) if inputs.view_advantages is None else inputs.view_advantages
    gains_RV, clipped_RV = clip(log_ratios_RV.exp(), advantages_RV, settings)
    per_token_RV = gains_RV * scored_RVT.any(-1) / scored_RVT.sum(-1).clamp(min=1)
    return -per_token_RV.sum() / inputs.scoring_views, share(clipped_RV, scored_RVT.any(-1))


def clipped_sequences(inputs: LossInputs, settings: Any) -> Loss:
    """PPO's loss with one ratio per completion, exp(bound - old bound), not divided by the length (EBPO, of
    LLaDA2.1)."""
    log_ratios = ((inputs.logps - inputs.old) * inputs.mask).sum(-1)
    positive = inputs.advantages >= 0
    # Clip logarithms, so that a clipped ratio cannot overflow.
    high = math.log1p(settings.epsilon if settings.epsilon_high is None else settings.epsilon_high)
    low = math.log1p(-settings.epsilon) if settings.epsilon < 1 else -math.inf
    held = torch.where(positive, log_ratios.clamp(max=high), log_ratios.clamp(min=low))
    clipped, taking_part = (held != log_ratios) & (inputs.advantages != 0), inputs.mask.bool().any(-1)
    return -(inputs.advantages * held.exp() * taking_part).mean(), share(clipped, taking_part)


def draws_log_ratios(inputs: LossInputs) -> Tensor:
    """(rows, draws) log-ratio of each draw's bound to the old policy's, divided by the completion's length."""
    difference_RVT = inputs.weights * (inputs.view_logps - known(inputs.view_old)) * inputs.mask.unsqueeze(1)
    per_draw_RD = inputs.by_draw(difference_RVT)
    # The weights are divided by the number of draws: multiply, for each draw's own estimate.
    return per_draw_RD.shape[1] * per_draw_RD / inputs.lengths.unsqueeze(1)


def bgpo(inputs: LossInputs, settings: Any) -> Loss:
    """BGPO's loss, the mean over draws (arXiv 2510.11683, section 3). d is a draw's log-ratio of bounds per token.

    The ratio exp(d) is replaced by its lower bound 1 + d if A > 0, and kept if A <= 0.
    """
    d_RD, advantages = draws_log_ratios(inputs), inputs.advantages.unsqueeze(1)
    gains_RD, clipped_RD = clip(torch.where(advantages > 0, 1 + d_RD, d_RD.exp()), advantages, settings)
    taking_part_RD = inputs.mask.bool().any(1, keepdim=True).expand_as(clipped_RD)
    return -(gains_RD * taking_part_RD).mean(), share(clipped_RD, taking_part_RD)


def gdsd(inputs: LossInputs, settings: Any) -> Loss:
    """(clamp(log r) / L - 10 A)^2 for the log-ratio of each draw, summed over draws (GDSD, arXiv 2605.29398).

    As in the published code, the log-ratio of the whole completion is clamped at log(1 +- epsilon), and the target lies
    far outside. So the gradient is that of -20 A log p / L inside the clamp, up to a millionth, and 0 outside.
    """
    log_ratios_RD = draws_log_ratios(inputs) * inputs.lengths.unsqueeze(1)
    held_RD = log_ratios_RD.clamp(math.log1p(-settings.epsilon), math.log1p(settings.epsilon))
    taking_part_RD = inputs.mask.bool().any(1, keepdim=True).expand_as(held_RD)
    distance_RD = held_RD / inputs.lengths.unsqueeze(1) - 10 * inputs.advantages.unsqueeze(1)
    return (distance_RD**2 * taking_part_RD).sum(1).mean(), share(held_RD != log_ratios_RD, taking_part_RD)


def likely(inputs: LossInputs) -> Tensor:
    """(rows, views, tokens) bool: the scored tokens that the view's step revealed, and those to which the current
    policy gives a probability of at least 0.6 (RLDF)."""
    if inputs.reveal_steps is None:
        raise ValueError("reveal_steps is missing: a view reveals the tokens of its first step")
    scored_RVT = inputs.scored
    steps_RVT = inputs.reveal_steps.unsqueeze(1).expand_as(scored_RVT)
    first = steps_RVT.masked_fill(~scored_RVT, torch.iinfo(steps_RVT.dtype).max).amin(-1, keepdim=True)
    return scored_RVT & ((steps_RVT == first) | (inputs.view_logps.detach() >= math.log(0.6)))


def mean_of_states(values_RVT: Tensor, counts_RVT: Tensor) -> Tensor:
    """The mean of values where `counts_RVT` is true: first per view, over the tokens of all rows of the micro-batch,
    then over the views."""
    return ((values_RVT * counts_RVT).sum((0, 2)) / counts_RVT.sum((0, 2)).clamp(min=1)).mean()


def rldf(inputs: LossInputs, settings: Any) -> Loss:
    """-A log p of the `likely` tokens in a few states of the rollout; the mean per state, then over states (RLDF)."""
    counts_RVT = likely(inputs)
    loss = mean_of_states(-inputs.advantages[:, None, None] * inputs.view_logps, counts_RVT)
    return loss, {"likely": (counts_RVT.sum() / inputs.scored.sum().clamp(min=1)).item()}


def evidence_bounds(inputs: LossInputs, eubo_beta: float) -> tuple[Tensor, Tensor]:
    """SPG's two estimates of the log-probability per token, (rows,) each (arXiv 2510.09541, section 3).

    The first is the weighted sum over views. The second, with beta = `eubo_beta` and t_v the share of a row's
    tokens that view v hides, is the mean over hidden tokens k of 1/beta log(mean over v of p_k(v)^beta [hidden] / t_v).

    With masks of a single block, the mean of the first over draws is a lower bound. The second is an upper bound only
    for beta >= the completion's length and many draws. With several blocks neither is a bound.
    """
    hidden_RVT = inputs.weights != 0
    shares_RV = hidden_RVT.sum(-1) / inputs.lengths.unsqueeze(1)  # t_v
    # log(p^beta / t_v); 1e-12 only where a view hides nothing, which is left out below
    powers_RVT = eubo_beta * inputs.view_logps - shares_RV.clamp(min=1e-12).log().unsqueeze(-1)
    met_RT = hidden_RVT.any(1)
    # A token that no view hides gets zeros: the logsumexp of -inf alone has a gradient of NaN.
    joined_RVT = torch.where(hidden_RVT, powers_RVT, -torch.inf).masked_fill(~met_RT.unsqueeze(1), 0.0)
    joined_RT = (joined_RVT.logsumexp(1) - math.log(hidden_RVT.shape[1])) / eubo_beta
    upper = joined_RT.masked_fill(~met_RT, 0.0).sum(-1) / met_RT.sum(-1).clamp(min=1)
    return inputs.logps.sum(-1), upper


def sandwiched(inputs: LossInputs, settings: Any) -> Tensor:
    """(rows,) SPG's bound: the lower one if A > 0, else a mixture with share `settings.eubo_share` of the upper one."""
    lower, upper = evidence_bounds(inputs, settings.eubo_beta)
    mixed = settings.eubo_share * upper + (1 - settings.eubo_share) * lower
    return torch.where(inputs.advantages > 0, lower, mixed)


def spg(inputs: LossInputs, settings: Any) -> Loss:
    """-A x bound, each row weighted by its length (SPG, arXiv 2510.09541, section 3)."""
    per_row = -inputs.advantages * sandwiched(inputs, settings) * inputs.lengths
    return averaged(per_row.unsqueeze(1), inputs, settings), {}


def sequence_log_ratios(inputs: LossInputs) -> Tensor:
    """(rows,) the estimator's log-ratio of a completion's new to old probability; without gradients."""
    return ((inputs.logps - inputs.old) * inputs.mask).sum(-1).detach()


def stable_drl(inputs: LossInputs, settings: Any) -> Loss:
    """-sum of w A x SPG's bound over a prompt's completions, where w is the softmax of their capped log-ratios;
    averaged over prompts (StableDRL, arXiv 2603.06743)."""
    most = math.log(settings.ratio_cap)
    own = sequence_log_ratios(inputs).clamp(max=most)
    group = torch.zeros_like(own).unsqueeze(1) if inputs.log_ratios is None else inputs.log_ratios.clamp(max=most)
    weights = (own - group.logsumexp(1)).exp() * group.shape[1]  # 1 on average, because the loss is a mean over rows
    loss = -(weights * inputs.advantages * sandwiched(inputs, settings)).mean()
    return loss, {"weight_max": weights.max().item()}


CLIP, BOUND = ("epsilon", "epsilon_high", "delta"), ("eubo_beta", "eubo_share")
# TRL's types whose mean is over rows, and those that weigh a whole row
TRLS_OVER_ROWS, TRLS_PER_ROW = ("grpo", "dr_grpo", "sapo", "luspo"), ("luspo", "vespo")
TRLS_MEANS, ROW_MEANS = ("grpo", "bnpo", "dr_grpo", "dapo"), ("sum", "grpo", "bnpo", "dapo", "active")
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
    "clipped_sequences": Objective(clipped_sequences, per_row=True, settings=CLIP[:2], idle=CLIP[:2]),
    "bgpo": Objective(bgpo, per_view=True, per_draw=True, per_row=True, settings=CLIP, idle=CLIP),
    "gdsd": Objective(gdsd, per_view=True, per_draw=True, per_row=True, settings=("epsilon",), idle=("epsilon",)),
    "rldf": Objective(rldf, reads_old=False, per_view=True, by_view=True, reads_steps=True, settings=()),
    "spg": Objective(
        spg,
        reads_old=False,
        per_view=True,
        per_row=True,
        linear=False,
        loss_types=ROW_MEANS,
        settings=("loss_type", *BOUND),
    ),
    "stable_drl": Objective(
        stable_drl,
        over_group=True,
        per_view=True,
        per_row=True,
        linear=False,
        settings=(*BOUND, "ratio_cap"),
        idle=("ratio_cap",),
    ),
}


# --- KL penalties -----------------------------------------------------------------------------------------------------
#
# Named by `kl`, weighed by `beta`. With log d = log p_reference - log p, k2 is (log d)^2 / 2 and k3 is d - log d - 1
# (J. Schulman, Approximating KL divergence, 2020).


def k3_of(log_d: Tensor) -> Tensor:
    return log_d.exp() - log_d - 1


def k3(inputs: LossInputs, settings: Any) -> Tensor:
    """k3 of each token in each view, summed with the views' weights. With `--objective trl` the penalty is TRL's own
    instead, k3 of the views' weighted sum."""
    per_token_RVT = k3_of(known(inputs.view_reference) - inputs.view_logps)
    return averaged((inputs.weights * per_token_RVT * inputs.mask.unsqueeze(1)).sum(-1), inputs, settings)


def k3_to_old(inputs: LossInputs, settings: Any) -> Tensor:
    """k3 to the policy that sampled: summed over a view's tokens, averaged over views (TraceRL, arXiv 2509.06949)."""
    per_token_RVT = k3_of(known(inputs.view_old) - inputs.view_logps)
    return (per_token_RVT * inputs.scored).sum() / inputs.scoring_views


def k3_steps(inputs: LossInputs, settings: Any) -> Tensor:
    """k3 of the product of a view's probabilities, divided by its number of tokens; averaged over views (EGSPO)."""
    scored_RVT = inputs.scored
    log_d_RV = ((known(inputs.view_reference) - inputs.view_logps) * scored_RVT).sum(-1)
    per_token_RV = k3_of(log_d_RV) * scored_RVT.any(-1) / scored_RVT.sum(-1).clamp(min=1)
    return per_token_RV.sum() / inputs.scoring_views


def k3_likely(inputs: LossInputs, settings: Any) -> Tensor:
    """k3 of each `likely` token, averaged like the objective `rldf` (RLDF)."""
    return mean_of_states(k3_of(known(inputs.view_reference) - inputs.view_logps), likely(inputs))


def k2_sequence(inputs: LossInputs, settings: Any) -> Tensor:
    """k2 of a completion's whole log-probability, divided by its length (ESPO, arXiv 2512.03759)."""
    log_d = ((known(inputs.reference) - inputs.logps) * inputs.mask).sum(-1)
    return (log_d**2 / 2 / inputs.lengths).mean()


def k2_draws(inputs: LossInputs, settings: Any) -> Tensor:
    """k2 of each draw's whole log-probability, divided by the completion's length; averaged over draws (GDSD)."""
    difference_RVT = inputs.weights * (known(inputs.view_reference) - inputs.view_logps) * inputs.mask.unsqueeze(1)
    log_d_RD = inputs.by_draw(difference_RVT)
    log_d_RD = log_d_RD.shape[1] * log_d_RD  # as in `draws_log_ratios`
    return (log_d_RD**2 / 2 / inputs.lengths.unsqueeze(1)).mean()


PENALTIES: dict[str, Penalty] = {
    "k3": Penalty(k3, settings=("loss_type",), by_view=True),
    "k3_to_old": Penalty(k3_to_old, to="old", settings=(), by_view=True),
    "k3_steps": Penalty(k3_steps, settings=(), by_view=True),
    "k3_likely": Penalty(k3_likely, settings=(), by_view=True, reads_steps=True),
    "k2_sequence": Penalty(k2_sequence, settings=(), per_row=True),
    "k2_draws": Penalty(k2_draws, settings=(), per_row=True),
}


# --- Advantages -------------------------------------------------------------------------------------------------------
#
# The setting `advantage` names one of these functions of TRL's advantages, (groups, completions per prompt): rewards
# minus their group's mean, divided as `scale_rewards` says.


def leave_one_out(advantages: Tensor) -> Tensor:
    """A reward minus the mean of the other rewards in its group (RLOO, arXiv 2402.14740)."""
    generations = advantages.shape[1]
    return advantages * generations / (generations - 1)  # r_i - mean of the others = n / (n - 1) (r_i - m)


def signed_softmax(advantages: Tensor) -> Tensor:
    """softmax(A) - softmax(-A) over the group (wd1, arXiv 2507.08838, section 3), times the group's size: wd1 sums over
    a group and averages over groups, and the loss here is a mean over rows."""
    return (advantages.softmax(1) - (-advantages).softmax(1)) * advantages.shape[1]


def standardised(advantages: Tensor) -> Tensor:
    """Advantages divided by the group's standard deviation (divisor n, no epsilon); 0 where the deviation is 0."""
    return (advantages / advantages.std(1, correction=0, keepdim=True)).nan_to_num(0.0, 0.0, 0.0)


def floored(advantages: Tensor) -> Tensor:
    """Advantages divided by the group's standard deviation, or by 0.01 if that is larger (RLDF)."""
    return advantages / advantages.std(1, keepdim=True).clamp(min=0.01)


ADVANTAGES: dict[str, Advantage] = {
    "trl": Advantage(None, centred=False),
    "leave_one_out": Advantage(leave_one_out),
    "signed_softmax": Advantage(signed_softmax),
    "standardised": Advantage(standardised),
    "floored": Advantage(floored),
}
