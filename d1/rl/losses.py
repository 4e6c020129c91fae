"""The losses of RL: pure functions in literal tables of objectives, KL penalties and advantages.

From top to bottom: the inputs of a loss; means; entries of the tables, which say what a function reads and needs;
objectives, KL penalties and advantages that several methods use. What one paper alone uses is in its method's file
(`d1/rl/methods/`), and joins these tables in `d1/rl/tables.py`. A new one is a function and an entry, in a method's
file.

Shapes end a tensor's name where it has several dimensions: R rows, V views, T tokens of the canvas, D draws. The name
`logps_RVT` is (rows, views, tokens). This module imports no torch, so that the methods' files need none either.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal

from d1.scoring.entry import describe_function, describe_value

if TYPE_CHECKING:
    from torch import Tensor

    Loss = tuple[Tensor, dict[str, float]]  # of one micro-batch, a scalar; and metrics to log, of this process's rows

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
        active: completions whose advantage is not 0, averaged in the same way; None: counted in this micro-batch.
        views_per_draw: `Estimator.views_per_draw`, where 0 means that all views are one draw.
        reveal_steps: (rows, tokens), the step that revealed each token; in a block-causal model, counted from the first
            step of its block.
        view_advantages: (rows, views), the advantage of each view's state; None without `state_reward` or a tree.
        log_ratios: (rows, completions per prompt), `sequence_log_ratios` of the rows of each row's prompt, under the
            policy before this update; None unless `Objective.over_group`.
        sampling_weights: (rows, tokens), the weight of each token in the policy gradient (`truncated_weights`); None
            if `sampling_weight_cap` is None.
        turns: rows per completion: the turns of an episode are rows, with empty ones for an episode with fewer turns.
        given: (rows, tokens) bool, the tokens that a rollout was given and did not sample (`hints`); None: there are
            none in this rollout.
        old_entropies: (rows, tokens), the entropy of each token's distribution in the views of the first update, under
            the policy that sampled; None unless there are given tokens and `Objective.reads_given`.
        sibling_advantages: (rows, views, siblings), in a tree of rollouts, the advantages of all children of the node
            whose state the view scores in; None without a tree.
        sibling_ids: (rows, views, siblings, tokens), the tokens of these children that count, revealed between their
            parent and them; -1 elsewhere, and where the view scores nothing in the row.
        sibling_positions: positions where a child with an advantage above 0 has such a token, each once per parent, per
            micro-batch, averaged over the whole rollout and all processes.
        progress: the share of the run that is done: of its optimizer steps or, if that is more, of its
            `max_compute_tokens`.
        is_right: (rows,) bool, whether the completion is right: its accuracy is 1. None if the run has no accuracy
            (`Objective.reads_right`).
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
    given: Tensor | None = None
    old_entropies: Tensor | None = None
    sibling_advantages: Tensor | None = None
    sibling_ids: Tensor | None = None
    sibling_positions: Tensor | None = None
    progress: float = 0.0
    is_right: Tensor | None = None

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
        return (self.weights * require_logps(self.view_old)).sum(1)

    @property
    def reference(self) -> Tensor | None:
        """(rows, tokens), those of the reference model."""
        if self.view_reference is None:
            return None
        return (self.weights * self.view_reference).sum(1)

    @property
    def counted(self) -> Tensor:
        """(rows, tokens), each token's weight in the policy gradient: `mask`, times the sampling weights if any."""
        if self.sampling_weights is None:
            return self.mask
        return self.mask * self.sampling_weights

    @property
    def scored(self) -> Tensor:
        """(rows, views, tokens) bool, whether a view scores a token."""
        return (self.weights * self.mask.unsqueeze(1)) != 0

    @property
    def scoring_views(self) -> Tensor:
        """Views that score something, per micro-batch, averaged over the rollout."""
        if self.views is not None:
            return self.views
        return self.scored.any(-1).sum().clamp(min=1)

    @property
    def scored_pairs(self) -> Tensor:
        """Tokens that views score, per micro-batch, averaged over the rollout."""
        if self.pairs is not None:
            return self.pairs
        return self.scored.sum().clamp(min=1)

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
        if self.active is not None:
            return self.active
        is_active = self.advantages.ne(0) & self.mask.bool().any(-1)
        return is_active.sum().clamp(min=1)

    @property
    def lengths(self) -> Tensor:
        """(rows,), number of scored tokens; at least 1, because it is a divisor."""
        return self.mask.sum(-1).clamp(min=1)

    def by_draw(self, values: Tensor) -> Tensor:
        """(rows, draws), sums of `values` (rows, views, tokens) over the tokens and views of each draw."""
        # The views of a draw are `draws` apart: view v belongs to draw v modulo the number of draws.
        return values.sum(-1).unflatten(1, (self.views_per_draw or values.shape[1], -1)).sum(1)


def require_logps(view_logps: Tensor | None) -> Tensor:
    """Old or reference log-probabilities, which are there if the entry in use asked for them (else ValueError)."""
    if view_logps is None:
        raise ValueError(
            "these log-probs are not scored: an Objective needs reads_old=True, a Penalty to='old' or to='reference', "
            "an Advantage reads=('old', 'reference')"
        )
    return view_logps


# --- Means: the divisor of a loss, named by `loss_type` ---------------------------------------------------------------
#
# Divisors that count tokens, views or rows count them over the whole rollout, so results do not depend on its split
# into micro-batches. Three exceptions count within a micro-batch, as published: `bnpo`, TRL's and d1's, and the
# objectives `rldf` and `igpo` with their penalties.


def mean_of_views(sums_RV: Tensor, inputs: LossInputs, settings: Any) -> Tensor:
    """The weighted mean over the tokens of a view, then the mean over all views that score something."""
    weights_RV = (inputs.weights * inputs.mask.unsqueeze(1)).sum(-1)
    return (sums_RV / weights_RV.where(weights_RV != 0, 1.0)).sum() / inputs.scoring_views


def mean_of_rows(sums_RV: Tensor, inputs: LossInputs, settings: Any) -> Tensor:
    """The mean over completions of their sums."""
    return sums_RV.sum(1).mean() * inputs.turns


def mean_of_row_means(sums_RV: Tensor, inputs: LossInputs, settings: Any) -> Tensor:
    """The mean over a completion's tokens, then the mean over completions."""
    return (sums_RV.sum(1) / inputs.lengths).mean() * inputs.turns


def mean_of_micro_batch(sums_RV: Tensor, inputs: LossInputs, settings: Any) -> Tensor:
    """The sum, divided by the tokens of the micro-batch."""
    return sums_RV.sum() / inputs.mask.sum().clamp(min=1)


def mean_of_tokens(sums_RV: Tensor, inputs: LossInputs, settings: Any) -> Tensor:
    """The sum, divided by the tokens of the rollout."""
    return sums_RV.sum() / inputs.tokens


def mean_of_active_rows(sums_RV: Tensor, inputs: LossInputs, settings: Any) -> Tensor:
    """The sum, divided by the canvases of the rows with an advantage."""
    return sums_RV.sum() / (inputs.active_rows * settings.max_completion_length)


def mean_of_scored_pairs(sums_RV: Tensor, inputs: LossInputs, settings: Any) -> Tensor:
    """The sum, divided by the number of pairs of a view and a token that it scores."""
    return sums_RV.sum() / inputs.scored_pairs


def mean_of_rounds(sums_RV: Tensor, inputs: LossInputs, settings: Any) -> Tensor:
    """The sum, divided by the tokens of all rounds over the block."""
    return sums_RV.sum() * settings.block_length / inputs.repeated_tokens


@dataclass(frozen=True)
class Mean:
    """An entry of `MEANS`.

    Attributes:
        reduce: gets sums over tokens (rows, views), the inputs and the settings, and returns a scalar.
        weighs_views: views count by their weights. False: each view is divided by its own, so that all count alike.
    """

    reduce: Callable[[Tensor, LossInputs, Any], Tensor]
    weighs_views: bool = True

    def __call__(self, sums_RV: Tensor, inputs: LossInputs, settings: Any) -> Tensor:
        return self.reduce(sums_RV, inputs, settings)


# Means of sums over tokens, (rows, views). `sum`, `active`, `scored`, `rounds` and `views` are ours, the others TRL's.
# Those over rows are means over completions: an episode's turns are added up. With the objective `trl`, which d1 has,
# TRL divides by itself: these are for the other objectives.
MEANS: dict[str, Mean] = {
    "sum": Mean(mean_of_rows),
    "grpo": Mean(mean_of_row_means),
    "bnpo": Mean(mean_of_micro_batch),
    "dapo": Mean(mean_of_tokens),
    "active": Mean(mean_of_active_rows),
    "scored": Mean(mean_of_scored_pairs),
    "rounds": Mean(mean_of_rounds),
    "views": Mean(mean_of_views, weighs_views=False),
}


def reduce_loss(sums_RV: Tensor, inputs: LossInputs, settings: Any) -> Tensor:
    """The mean that `settings.loss_type` names."""
    return MEANS[settings.loss_type](sums_RV, inputs, settings)


# --- Entries of the tables --------------------------------------------------------------------------------------------
#
# An entry is called like its function and checks the returned value, so that a mistake in a user's function is one
# line. The checks of combinations, the scoring and the plan of a run read the entries, so users' entries are treated
# like the others.


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
        weighs_views: views count by their weights; False: all alike, whatever their weights. If it reads `loss_type`,
            the mean's own `weighs_views` holds, too.
        per_row: it has one ratio or one bound per row, which must be a whole completion: no turn of an episode.
        linear: it uses log-probabilities; False: bounds computed from means over hidden tokens (`Estimator.linear`).
        reads_steps: it reads `LossInputs.reveal_steps`, so that each token must have been revealed once and kept.
        reads_given: it reads `LossInputs.old_entropies` of given tokens; if False, these are not scored.
        view_advantages: it uses `LossInputs.view_advantages` where they are.
        reads_right: it reads `LossInputs.is_right`, so that the last reward must be the task's accuracy.
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
    weighs_views: bool = True
    per_row: bool = False
    linear: bool = True
    reads_steps: bool = False
    reads_given: bool = False
    view_advantages: bool = False
    reads_right: bool = False
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
            found = f"{describe_function(self.loss)} returned {describe_value(returned)}"
            raise ValueError(f"{found}: expected a pair (loss, metrics)")
        checked_scalar(self.loss, returned[0], inputs)
        for name, value in returned[1].items():
            if not isinstance(value, int | float):
                found = f"{describe_function(self.loss)} gave the metric {name!r}: {describe_value(value)}"
                raise ValueError(f"{found}, expected a number")
        return returned


@dataclass(frozen=True)
class Penalty:
    """An entry of the table of KL penalties.

    Attributes:
        value: returns the penalty of one micro-batch, a scalar.
        to: whose log-probabilities it compares with the policy's. "reference" needs a reference model.
        settings, by_view, weighs_views, per_row, reads_steps: as in `Objective`. With drawn views, `by_view` is needed:
            in weighted sums of log-probabilities, the weights of the draws are inverse probabilities.
    """

    value: Callable[[LossInputs, Any], Tensor]
    to: Literal["reference", "old"] = "reference"
    settings: tuple[str, ...] | None = None
    by_view: bool = False
    weighs_views: bool = True
    per_row: bool = False
    reads_steps: bool = False

    def __call__(self, inputs: LossInputs, settings: Any) -> Tensor:
        """The penalty. Raises ValueError if the function did not return a scalar with a gradient."""
        return checked_scalar(self.value, self.value(inputs, settings), inputs)


BOUND_MODELS = ("old", "reference")  # the models of `Advantage.reads`


@dataclass(frozen=True)
class AdvantageInputs:
    """What an advantage reads of a rollout: whole groups, (groups, completions per prompt) each.

    Attributes:
        advantages: TRL's: rewards minus their group's mean, or as `scale_rewards` says.
        lengths: tokens of each completion that count in the loss; None unless `Advantage.reads` has an entry.
        old_bounds: the estimator's log-probability of each completion under the policy before the first update on the
            rollout: the weighted sum over views and tokens. None unless `Advantage.reads` has "old".
        reference_bounds: the same under the reference model, in the same views. None unless `Advantage.reads` has
            "reference".
    """

    advantages: Tensor
    lengths: Tensor | None = None
    old_bounds: Tensor | None = None
    reference_bounds: Tensor | None = None


@dataclass(frozen=True)
class Advantage:
    """An entry of the table of advantages.

    Attributes:
        of: TRL's advantages (groups, completions per prompt) -> the same shape. None leaves them as they are. With
            `reads`, a function of `AdvantageInputs` and the settings of the run instead.
        centred: it needs rewards minus their group's mean, so `scale_rewards` must be "none".
        reads: the models under which it reads bounds of whole completions: "old", "reference" or both. They are scored
            once per rollout, in one draw of the run's estimator that no update uses.
        settings: the settings that it reads; setting another one is an error. None: unknown.
        kept_only: it gets only the groups with a completion in the loss; the advantages of the others are 0.
        over_rollout: it computes over all groups together. Then `AdvantageInputs.advantages` is NaN for completions to
            which no reward applies, and it must leave them out. False: it computes each group by itself, and gets a
            group in which some completions have no reward alone and without these, or not at all if fewer than two are
            left. In both cases the advantage of a completion without a reward is 0.
    """

    of: Callable[..., Tensor] | None
    centred: bool = True
    reads: tuple[str, ...] = ()
    settings: tuple[str, ...] | None = None
    kept_only: bool = False
    over_rollout: bool = False

    def __post_init__(self) -> None:
        if isinstance(self.reads, str) or not {*self.reads} <= {*BOUND_MODELS}:
            known = " and ".join(BOUND_MODELS)
            raise ValueError(f"an Advantage reads bounds of {known}, in a tuple; got {self.reads!r}")

    def __call__(self, inputs: AdvantageInputs | Tensor, settings: Any = None) -> Tensor:
        """The advantages. Raises ValueError if the function returned something else, or numbers that are not finite."""
        from torch import Tensor

        assert self.of is not None
        if not isinstance(inputs, AdvantageInputs):
            inputs = AdvantageInputs(inputs)
        groups = inputs.advantages
        if self.reads:
            returned = self.of(inputs, settings)
        else:
            returned = self.of(groups)
        if not isinstance(returned, Tensor) or returned.shape != groups.shape or not returned.is_floating_point():
            expected = f"floats of shape {tuple(groups.shape)}"
            raise ValueError(f"{describe_function(self.of)} returned {describe_value(returned)}: expected {expected}")
        # A completion without a reward is NaN already, with `over_rollout`.
        is_bad = groups.isfinite() & ~returned.isfinite()
        for group in is_bad.any(1).nonzero().flatten().tolist():
            raise ValueError(
                f"{describe_function(self.of)} returned {returned[group].tolist()} for the group "
                f"{groups[group].tolist()}: expected finite numbers, also where a group's rewards are equal and their "
                "standard deviation is 0"
            )
        return returned


def checked_scalar(function: object, value: Any, inputs: LossInputs) -> Tensor:
    """Raises ValueError unless a function returned a scalar, with a gradient if the policy's log-probs have one."""
    from torch import Tensor

    if isinstance(value, Tensor) and value.dim() == 0 and value.requires_grad >= inputs.view_logps.requires_grad:
        return value
    found = f"{describe_function(function)} returned {describe_value(value)}"
    raise ValueError(f"{found}: expected a scalar tensor with a gradient")


# --- Objectives -------------------------------------------------------------------------------------------------------
#
# `objective: trl`, the default, is TRL's own loss with all its `loss_type`s and `importance_sampling_level`s; d1's is
# `loss_type: bnpo`. In the equations, p is the policy, A the advantage and r a ratio of p to the old policy.


def reinforce(inputs: LossInputs, settings: Any) -> Loss:
    """-A log p: the policy gradient, without ratio and clipping (Williams 1992)."""
    per_row = -inputs.advantages * (inputs.logps * inputs.counted).sum(-1)
    return reduce_loss(per_row.unsqueeze(1), inputs, settings), {}


def clip(ratios: Tensor, advantages: Tensor, settings: Any) -> tuple[Tensor, Tensor]:
    """PPO's min(r A, clip(r) A), and where clipping removes the gradient; `advantages` broadcasts to `ratios`.

    `settings.delta` also bounds the ratios above (dual clip, arXiv 1912.09729), which matters for negative advantages.
    """
    epsilon_high = settings.epsilon_high
    if epsilon_high is None:
        epsilon_high = settings.epsilon
    low, high = 1 - settings.epsilon, 1 + epsilon_high
    delta = settings.delta
    if delta is None:
        delta = math.inf
    gains = (ratios.clamp(max=delta) * advantages).minimum(ratios.clamp(low, high) * advantages)

    # Where the gain is constant in the ratio.
    is_clipped_up = (ratios > min(high, delta)) & (advantages > 0)
    is_clipped_down = ((ratios < low) | (ratios > max(high, delta))) & (advantages < 0)
    return gains, is_clipped_up | is_clipped_down


def clip_ratio_metric(what: Tensor, of: Tensor) -> dict[str, float]:
    """The metric of clipping: the share of the elements of `of` that are also in `what`, both bool."""
    return {"clip_ratio/region_mean": ((what & of).sum() / of.sum().clamp(min=1)).item()}


def clipped_views(inputs: LossInputs, settings: Any) -> Loss:
    """PPO's loss with one ratio per token per view; the views' losses are summed with their weights.

    TRL's loss gets a weighted sum of log-probs instead, where a weight becomes an exponent of the ratio.
    """
    ratios_RVT = (inputs.view_logps - require_logps(inputs.view_old)).exp()
    advantages_RV = inputs.view_advantages
    if advantages_RV is None:
        advantages_RV = inputs.advantages.unsqueeze(1)
    gains_RVT, clipped_RVT = clip(ratios_RVT, advantages_RV.unsqueeze(-1), settings)
    counted_RVT = inputs.weights * inputs.counted.unsqueeze(1)
    loss = reduce_loss(-(counted_RVT * gains_RVT).sum(-1), inputs, settings)
    return loss, clip_ratio_metric(clipped_RVT, inputs.scored)


def draws_log_ratios(inputs: LossInputs) -> Tensor:
    """(rows, draws) log-ratio of each draw's bound to the old policy's, divided by the completion's length."""
    difference_RVT = inputs.weights * (inputs.view_logps - require_logps(inputs.view_old)) * inputs.mask.unsqueeze(1)
    per_draw_RD = inputs.by_draw(difference_RVT)
    # The weights are divided by the number of draws: multiply, for each draw's own estimate.
    return per_draw_RD.shape[1] * per_draw_RD / inputs.lengths.unsqueeze(1)


def sequence_log_ratios(inputs: LossInputs) -> Tensor:
    """(rows,) the estimator's log-ratio of a completion's new to old probability; without gradients."""
    return ((inputs.logps - inputs.old) * inputs.mask).sum(-1).detach()


CLIP = ("epsilon", "epsilon_high", "delta")
# What TRL's loss reads with some of its types only. With cispo, ratios have an upper bound alone: epsilon_high, or
# epsilon if that is unset.
TRLS_SETTINGS: dict[str, tuple[str, ...]] = {
    "grpo": CLIP,
    "bnpo": CLIP,
    "dr_grpo": CLIP,
    "dapo": CLIP,
    "luspo": CLIP,
    "cispo": ("epsilon", "epsilon_high"),
    "sapo": ("sapo_temperature_pos", "sapo_temperature_neg"),
    "vespo": ("vespo_k_pos", "vespo_k_neg", "vespo_lambda_pos", "vespo_lambda_neg"),
}
# TRL's types whose mean is over rows, and those that weigh a whole row
TRLS_OVER_ROWS, TRLS_PER_ROW = ("grpo", "dr_grpo", "sapo", "luspo"), ("luspo", "vespo")
ROW_MEANS = ("sum", "grpo", "bnpo", "dapo", "active")
OBJECTIVES: dict[str, Objective] = {
    "trl": Objective(
        None,
        loss_types=tuple(TRLS_SETTINGS),
        own_kl="k3",
        settings=(
            *("loss_type", *CLIP, "sampling_weight_cap", "importance_sampling_level", "top_entropy_quantile"),
            "off_policy_mask_threshold",
            *TRLS_SETTINGS["sapo"],
            *TRLS_SETTINGS["vespo"],
        ),
        idle=CLIP,
    ),
    "reinforce": Objective(
        reinforce, reads_old=False, loss_types=ROW_MEANS, settings=("loss_type", "sampling_weight_cap")
    ),
    "clipped_views": Objective(
        clipped_views,
        per_view=True,
        by_view=True,
        view_advantages=True,
        settings=("loss_type", *CLIP, "sampling_weight_cap"),
        idle=CLIP,
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
    per_token_RVT = k3_of(require_logps(inputs.view_reference) - inputs.view_logps)
    return reduce_loss((inputs.weights * per_token_RVT * inputs.mask.unsqueeze(1)).sum(-1), inputs, settings)


PENALTIES: dict[str, Penalty] = {
    "k3": Penalty(k3, settings=("loss_type",), by_view=True),
}


# --- Advantages -------------------------------------------------------------------------------------------------------
#
# The setting `advantage` names one of these functions of TRL's advantages, (groups, completions per prompt): rewards
# minus their group's mean, divided as `scale_rewards` says. A function may also read bounds of the completions
# (`Advantage.reads`).


def leave_one_out(advantages: Tensor) -> Tensor:
    """A reward minus the mean of the other rewards in its group (RLOO, arXiv 2402.14740)."""
    generations = advantages.shape[1]
    return advantages * generations / (generations - 1)  # r_i - mean of the others = n / (n - 1) (r_i - m)


def standardised(advantages: Tensor) -> Tensor:
    """Advantages divided by the group's standard deviation (divisor n, no epsilon); 0 where the deviation is 0."""
    return (advantages / advantages.std(1, correction=0, keepdim=True)).nan_to_num(0.0, 0.0, 0.0)


ADVANTAGES: dict[str, Advantage] = {
    "trl": Advantage(None, centred=False, settings=()),
    "leave_one_out": Advantage(leave_one_out, settings=()),
    "standardised": Advantage(standardised, settings=()),
}
