"""The contracts of RL's tables: the inputs of a loss, and the rows, which say what a function reads and needs.

A row is called like its function and checks the returned value, so that a mistake in a user's function is one line. The
checks of combinations, the scoring and the plan of a run read these rows, so users' rows are treated like the others.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal

from torch import Tensor

from d1.scoring.estimators import called, described


@dataclass(frozen=True)
class LossInputs:
    """A micro-batch under the views of the current inner update.

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
        active: rows whose advantage is not 0, averaged in the same way; None: those of this micro-batch.
        views_per_draw: `Estimator.views_per_draw`, where 0 means that all views are one draw.
        reveal_steps: (rows, tokens), the step that revealed each token; in a block-causal model, counted from the first
            step of its block.
        view_advantages: (rows, views), the advantage of each view's state; None without `state_reward`.
        log_ratios: (rows, completions per prompt), `sequence_log_ratios` of the rows of each row's prompt, under the
            policy before this update; None unless `Objective.over_group`.
        sampling_weights: (rows, tokens), the weight of each token in the policy gradient (`truncated_weights`); None
            if `sampling_weight_cap` is None.
    """

    view_logps: Tensor
    view_old: Tensor | None
    view_reference: Tensor | None
    weights: Tensor
    advantages: Tensor
    mask: Tensor
    tokens: Tensor
    views: Tensor | None = None
    active: Tensor | None = None
    views_per_draw: int = 1
    reveal_steps: Tensor | None = None
    view_advantages: Tensor | None = None
    log_ratios: Tensor | None = None
    sampling_weights: Tensor | None = None

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
    def active_rows(self) -> Tensor:
        """Rows in the loss whose advantage is not 0, per micro-batch, averaged over the rollout."""
        active = self.advantages.ne(0) & self.mask.bool().any(-1)
        return active.sum().clamp(min=1) if self.active is None else self.active

    def by_draw(self, values: Tensor) -> Tensor:
        """(rows, draws), sums of `values` (rows, views, tokens) over the tokens and views of each draw."""
        return values.sum(-1).unflatten(1, (self.views_per_draw or values.shape[1], -1)).sum(1)

    @property
    def lengths(self) -> Tensor:
        """(rows,), number of scored tokens; at least 1, because it is a divisor."""
        return self.mask.sum(-1).clamp(min=1)


def known(view_logps: Tensor | None) -> Tensor:
    """Old or reference log-probabilities, which are there if the row in use asked for them (else ValueError)."""
    if view_logps is None:
        raise ValueError("these log-probs are not scored: the row must say reads_old=True, or to='old' or 'reference'")
    return view_logps


def mean_of_views(views: Tensor, inputs: LossInputs, settings: Any) -> Tensor:
    """The weighted mean over the tokens of a view, then the mean over all views that score something."""
    weights = (inputs.weights * inputs.mask.unsqueeze(1)).sum(-1)
    return (views / weights.where(weights != 0, 1.0)).sum() / inputs.scoring_views


# How each `loss_type` averages losses (rows, views) that are sums over tokens: TRL's means of that name, and our own.
MEANS: dict[str, Callable[[Tensor, LossInputs, Any], Tensor]] = {
    "sum": lambda views, inputs, settings: views.sum(1).mean(),
    "grpo": lambda views, inputs, settings: (views.sum(1) / inputs.lengths).mean(),
    "dr_grpo": lambda views, inputs, settings: views.sum(1).mean() / settings.max_completion_length,
    "bnpo": lambda views, inputs, settings: views.sum() / inputs.mask.sum().clamp(min=1),
    "dapo": lambda views, inputs, settings: views.sum() / inputs.tokens,
    "active": lambda views, inputs, settings: views.sum() / (inputs.active_rows * settings.max_completion_length),
    "views": mean_of_views,
}


@dataclass(frozen=True)
class Objective:
    """A row of the table: the loss, and what it needs.

    Attributes:
        loss: returns the loss of one micro-batch, a scalar, and metrics to log, of this process's rows. The loss of a
            step is the mean over its micro-batches. None is TRL's own loss.
        reads_old: it reads log-probabilities of the policy that sampled; if False, these are not scored.
        over_group: it weighs a row against the others of its prompt and reads `LossInputs.log_ratios`.
        per_view: it uses each view's log-probabilities, not only their weighted sums.
        per_draw: it uses each draw as an estimate of the whole completion (`Estimator.views_per_draw`).
        reads_steps: it reads `LossInputs.reveal_steps`, so that each token must have been revealed once and kept.
        by_view: its mean is over views, so that the views can be divided among the updates (`split_views`).
        linear: it uses log-probabilities; False: bounds computed from means over hidden tokens (`Estimator.linear`).
        loss_types: the values of `loss_type` that it accepts.
        own_kl: the penalty that the loss adds itself.
        settings: the settings that it reads (`epsilon`, `loss_type`, ...); setting another one is an error. None:
            unknown.
        idle: the settings that do nothing as long as the policy is the one that sampled.
    """

    loss: Callable[[LossInputs, Any], tuple[Tensor, dict[str, float]]] | None
    reads_old: bool = True
    over_group: bool = False
    per_view: bool = False
    per_draw: bool = False
    by_view: bool = False
    linear: bool = True
    reads_steps: bool = False
    loss_types: tuple[str, ...] = tuple(MEANS)
    own_kl: str | None = None
    settings: tuple[str, ...] | None = None
    idle: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        if self.over_group and not self.reads_old:
            raise ValueError("an Objective with over_group compares with the old policy: it needs reads_old=True")

    def __call__(self, inputs: LossInputs, settings: Any) -> tuple[Tensor, dict[str, float]]:
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
    """A row of the table of KL penalties.

    Attributes:
        value: returns the penalty of one micro-batch, a scalar.
        to: whose log-probabilities it compares with the policy's. "reference" needs a reference model.
        settings, by_view, reads_steps: as in `Objective`.
    """

    value: Callable[[LossInputs, Any], Tensor]
    to: Literal["reference", "old"] = "reference"
    settings: tuple[str, ...] | None = None
    by_view: bool = False
    reads_steps: bool = False

    def __post_init__(self) -> None:
        if self.to not in ("reference", "old"):
            raise ValueError(f"a Penalty must have to='reference' or to='old', got {self.to!r}")

    def __call__(self, inputs: LossInputs, settings: Any) -> Tensor:
        """The penalty. Raises ValueError if the function did not return a scalar with a gradient."""
        return checked_scalar(self.value, self.value(inputs, settings), inputs)


@dataclass(frozen=True)
class Advantage:
    """A row of the table of advantages.

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
