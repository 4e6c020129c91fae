"""The effect of an estimator of log-probabilities on a policy gradient: its bias, its noise and its direction.

For completions o_i with advantages A_i an estimator gives v_i, its value of log p(o_i) in nats per token; the gradient
is that of the mean of A_i v_i. It is compared with two targets: the any-order bound (`d1/scoring/elbo.py`), which is
too large to enumerate and is approximated by many draws, and replay of every step (`d1/scoring/replay.py`), the
log-probability of the sampler's tokens in their states without that of its choice of places.

Completions whose advantage is 0 have no weight in a gradient: as in RL, they are neither scored nor charged.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields, replace
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from d1.masking import keyed_generator
from d1.scoring import ESTIMATORS, Randomness, SampledRows, Views, ViewSettings, score
from studies.estimators.choices import PAIRS, TRAJECTORY, Choice

BLOCK = 8  # tokens per block
LONG_RUN = 1_000_000  # the number of the first draw of the bound, far above those of a choice's draws
STREAM = 7
MEASURES = ("snr", "cosine_to_bound", "cosine_to_trajectory")  # those with intervals


@dataclass(frozen=True)
class Case:
    """A model and its completions, in groups of `group` rows with the same problem.

    Attributes:
        advantages: (rows,).
        tokens: tokens that the rollout processed.
        seed: of the draws.
    """

    model: Any
    sampled: SampledRows
    advantages: Tensor
    group: int
    mask_token_id: int
    tokens: int
    seed: int = 0

    @property
    def lengths(self) -> Tensor:
        return self.sampled.scored.sum(-1).clamp(min=1)

    @property
    def steps(self) -> int:
        return int(self.sampled.reveal_steps.max()) + 1

    @property
    def weights(self) -> list[Tensor]:
        return [weight for weight in self.model.parameters() if weight.requires_grad]

    @property
    def groups(self) -> Sequence[slice]:
        return [slice(start, start + self.group) for start in range(0, len(self.advantages), self.group)]


class Gradients(NamedTuple):
    """One draw of an estimator.

    Attributes:
        values: (rows,) in nats per token; 0 for rows without weight.
        gradients: (groups, weights), of each group's mean of advantage times value.
        tokens: the compute of the update: 1 per token of a forward pass and 2 for its backward pass.
    """

    values: Tensor
    gradients: Tensor
    tokens: int


class Target(NamedTuple):
    """The targets of estimators.

    Attributes:
        bound, trajectory: (rows,) in nats per token.
        bound_gradients, trajectory_gradients: (groups, weights).
        bound_error: relative standard error of the bound's gradient, the mean over groups.
    """

    bound: Tensor
    trajectory: Tensor
    bound_gradients: Tensor
    trajectory_gradients: Tensor
    bound_error: float


def draw(case: Case, choice: Choice, number: int) -> Views:
    """Draw `number` of a choice's views, for all rows; rows without weight score nothing."""
    rows = len(case.advantages)
    own = [keyed_generator(STREAM, case.seed, number, row) for row in range(rows)]
    random = Randomness(own, keyed_generator(STREAM, case.seed, number), 0, rows)
    settings = ViewSettings(case.sampled.gen_length, case.steps, BLOCK, **choice.settings)
    views = ESTIMATORS[choice.estimator](case.sampled, random, settings)
    return replace(views, weights=views.weights * (case.advantages != 0)[:, None, None])


def some_rows(sampled: SampledRows, which: slice) -> SampledRows:
    columns = {one.name: getattr(sampled, one.name) for one in fields(sampled)}
    rows: dict[str, Any] = {name: None if value is None else value[which] for name, value in columns.items()}
    return SampledRows(**rows)


def values_of(case: Case, choice: Choice, views: Views, which: slice) -> tuple[Tensor, int]:
    """For the rows `which`: differentiable values (rows,) in nats per token, and the compute of an update."""
    rows = some_rows(case.sampled, which)
    scores = score(
        case.model,
        rows.prompt_ids,
        rows.attention_mask,
        rows.canvas_ids,
        views.each(lambda values: values[which]),
        mask_token_id=case.mask_token_id,
        gen_length=rows.gen_length,
        views_at_once=views.weights.shape[1],
    )
    totals = scores.logps.sum(-1) / choice.weight
    return totals if choice.is_mean else totals / case.lengths[which], int(scores.compute)


def group_gradients(case: Case, choice: Choice, number: int) -> Gradients:
    """Draw `number` of a choice."""
    views, values, gradients, tokens = draw(case, choice, number), [], [], 0
    nothing = torch.zeros(sum(weight.numel() for weight in case.weights), dtype=case.weights[0].dtype)
    for which in case.groups:
        if not case.advantages[which].any():
            values.append(torch.zeros(case.group, dtype=nothing.dtype))
            gradients.append(nothing)
            continue
        found, cost = values_of(case, choice, views, which)
        of_weights = torch.autograd.grad((case.advantages[which] * found).mean(), case.weights)
        gradients.append(torch.cat([gradient.flatten() for gradient in of_weights]))
        values.append(found.detach())
        tokens += cost
    return Gradients(torch.cat(values), torch.stack(gradients), tokens)


def target_of(case: Case, bound_draws: int) -> Target:
    """The targets of a case's estimators; the bound has `bound_draws` draws, each of 16 pairs of opposite masks."""
    many = Choice("", "espo", 32, {"num_views": 16, **PAIRS})
    drawn = [group_gradients(case, many, LONG_RUN + number) for number in range(bound_draws)]
    gradients = torch.stack([one.gradients for one in drawn])
    whole = gradients.mean(1)
    error = (whole.var(0).sum() / bound_draws / whole.mean(0).square().sum()).sqrt().item()
    exact = group_gradients(case, TRAJECTORY, 0)
    bound = torch.stack([one.values for one in drawn]).mean(0)
    return Target(bound, exact.values, gradients.mean(0), exact.gradients, error)


def of_groups(products: np.ndarray, kept: np.ndarray, budget: float) -> dict[str, float | None]:
    """`MEASURES` of the gradient over some groups.

    Args:
        products: (n x groups, n x groups), inner products of the groups' gradients: those of each draw, then those of
            the bound, then those of the trajectory.
        kept: (groups,) 1 for groups that count, else 0.
        budget: draws that a rollout's tokens pay for.

    Returns:
        Means of the draws' cosines; and the signal-to-noise ratio: the gradient's square over its variance between
        draws, times `budget`, with an unbiased estimate of both. It can be below 0, and is None for one draw.
    """
    means = np.kron(np.eye(len(products) // len(kept)), kept / kept.sum())
    inner = means @ products @ means.T
    lengths = np.sqrt(np.diag(inner))
    draws = len(inner) - 2
    cosines = (inner / np.outer(lengths, lengths))[:draws, draws:].mean(0)
    of_mean, snr = inner[:draws, :draws].mean(), None
    if draws > 1:
        noise = (np.trace(inner[:draws, :draws]) / draws - of_mean) * draws / (draws - 1)
        snr = float(budget * (of_mean - noise / draws) / noise)
    return {"snr": snr, "cosine_to_bound": float(cosines[0]), "cosine_to_trajectory": float(cosines[1])}


def measure(case: Case, choice: Choice, target: Target, draws: int) -> dict[str, Any]:
    """All measurements of a choice, over `draws` draws of its views.

    `MEASURES` come with their values on all groups but one, for each group: `without`, for the jackknife.
    """
    taken = [group_gradients(case, choice, number) for number in range(draws)]
    tokens = sum(one.tokens for one in taken) / len(taken)
    counted = case.advantages != 0
    values = torch.stack([one.values for one in taken])[:, counted]
    bias = {name: (values.mean(0) - getattr(target, name)[counted]).mean().item() for name in ("bound", "trajectory")}
    flat = torch.cat([*(one.gradients for one in taken), target.bound_gradients, target.trajectory_gradients])
    products, groups = (flat @ flat.T).double().numpy(), len(case.groups)
    without = [of_groups(products, 1 - row, case.tokens / tokens) for row in np.eye(groups)]
    return {
        "draws": len(taken),
        "cost": tokens / case.tokens,
        **{f"bias_to_{name}": value for name, value in bias.items()},
        "deviation": values.var(0).mean().sqrt().item() if len(taken) > 1 else 0.0,
        **of_groups(products, np.ones(groups), case.tokens / tokens),
        "without": {name: [one[name] for one in without] for name in MEASURES},
    }
