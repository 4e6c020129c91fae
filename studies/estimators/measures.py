"""The effect of an estimator of log-probabilities on a policy gradient: its bias, its noise and its direction.

For completions o_i with advantages A_i an estimator gives v_i, its value of log p(o_i) in nats per token; the gradient
is that of the mean of A_i v_i. It is compared with two targets: the any-order bound (`d1/scoring/elbo.py`), which is
too large to enumerate and is approximated by many draws, and the sampler's own trajectory, which replay of every step
gives exactly (`d1/scoring/replay.py`).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, fields
from typing import Any, NamedTuple

import torch
from torch import Tensor

from d1.masking import keyed_generator
from d1.scoring import ESTIMATORS, Randomness, SampledRows, Views, ViewSettings, score

BLOCK = 8  # tokens per block
LONG_RUN = 1_000_000  # the number of the first draw of a long run, far above those of a choice's draws
STREAM = 7


@dataclass(frozen=True)
class Choice:
    """An estimator with its settings.

    Attributes:
        views: views per row, for the table.
        weight: the average sum of its weights for a token; its value is divided by this.
        is_mean: it gives a mean over tokens; others give a sum.
        random: its draws differ.
    """

    name: str
    estimator: str
    views: int
    settings: dict[str, Any] = field(default_factory=dict)
    weight: float = 1.0
    is_mean: bool = False
    random: bool = True


TRAJECTORY = Choice("replay, every step", "replay", 16, random=False)
PAIRS = {"antithetic": True, "stratified": True}
CHOICES = [
    Choice("one step, prompt hidden by .15", "one_step", 1, {"p_mask_prompt": 0.15}),
    Choice("one step", "one_step", 1, random=False),
    *(Choice("random mask", "random_masks", n, {"num_views": n}) for n in (1, 35)),
    Choice("coupled", "coupled", 3, weight=1.5),
    Choice("complements", "complements", 4, {"num_views": 2, "stratified": True}, weight=0.5),
    *(Choice("spg", "spg", n, {"num_views": n, "p_mask_prompt": 0.15}, is_mean=True) for n in (1, 2, 4)),
    *(Choice("elbo", "elbo", n, {"num_views": n}) for n in (1, 2, 4, 8)),
    Choice("elbo, stratified", "elbo", 16, {"num_views": 16, "stratified": True}),
    *(Choice("elbo, opposite, stratified", "elbo", 2 * n, {"num_views": n, **PAIRS}) for n in (1, 2, 4)),
    Choice("counts, stratified", "counts", 16, {"num_views": 16, "stratified": True}),
    Choice("gauss", "gauss", 3),
    *(Choice("espo, opposite, stratified", "espo", 2 * n, {"num_views": n, **PAIRS}) for n in (1, 2, 4)),
    *(Choice("replay, drawn evenly", "replay", n, {"num_views": n}) for n in (1, 2, 4, 8, 24)),
    *(Choice("replay, drawn by entropy", "replay", n, {"num_views": n, "draw_steps": "entropy"}) for n in (1, 4, 24)),
    *(Choice("replay, merged", "replay", n, {"segment_steps": 16 // n}, random=False) for n in (1, 2, 4, 8)),
    TRAJECTORY,
    Choice("segments, prompt hidden by .15", "segments", 16, {"segments": 16, "p_mask_prompt": 0.15}),
    Choice("states", "states", 4, {"num_views": 4}),
    Choice("left to right", "left_to_right", 32, random=False),
]


@dataclass(frozen=True)
class Case:
    """A model and its completions, in groups of `group` rows with the same prompt; advantages are (rows,)."""

    model: Any
    sampled: SampledRows
    advantages: Tensor
    group: int
    mask_token_id: int

    @property
    def lengths(self) -> Tensor:
        return self.sampled.scored.sum(-1).clamp(min=1)

    @property
    def steps(self) -> int:
        return int(self.sampled.reveal_steps.max()) + 1

    @property
    def weights(self) -> list[Tensor]:
        return [weight for weight in self.model.parameters() if weight.requires_grad]


class Target(NamedTuple):
    """The targets of estimators: values (rows,) in nats per token, gradients (weights,), and the relative standard
    errors of the bound's mean and of its gradient."""

    bound: Tensor
    trajectory: Tensor
    bound_gradient: Tensor
    trajectory_gradient: Tensor
    bound_error: float
    gradient_error: float


def draw(case: Case, choice: Choice, number: int) -> Views:
    """Draw `number` of a choice's views, for all rows."""
    rows = len(case.sampled.scored)
    own = [keyed_generator(STREAM, number, row) for row in range(rows)]
    random = Randomness(own, keyed_generator(STREAM, number), 0, rows)
    settings = ViewSettings(case.sampled.gen_length, case.steps, BLOCK, **choice.settings)
    return ESTIMATORS[choice.estimator](case.sampled, random, settings)


def some_rows(sampled: SampledRows, which: slice) -> SampledRows:
    columns = {one.name: getattr(sampled, one.name) for one in fields(sampled)}
    rows: dict[str, Any] = {name: None if value is None else value[which] for name, value in columns.items()}
    return SampledRows(**rows)


def values_of(case: Case, choice: Choice, views: Views, which: slice) -> tuple[Tensor, int]:
    """For the rows `which`: differentiable values (rows,) in nats per token, and the number of tokens processed."""
    rows = some_rows(case.sampled, which)
    scores = score(
        case.model,
        rows.prompt_ids,
        rows.attention_mask,
        rows.completion_ids,
        views.each(lambda values: values[which]),
        mask_token_id=case.mask_token_id,
        gen_length=rows.gen_length,
        views_at_once=views.weights.shape[1],
    )
    totals = scores.logps.sum(-1) / choice.weight
    return totals if choice.is_mean else totals / case.lengths[which], int(scores.compute)


def flat_gradient(case: Case, loss: Tensor) -> Tensor:
    grads = torch.autograd.grad(loss, case.weights)
    return torch.cat([grad.flatten() for grad in grads])


def group_gradients(case: Case, choice: Choice, views: Views) -> tuple[Tensor, Tensor, int]:
    """Values (rows,), gradients (groups, weights) of each group's mean of advantage times value, and the number of
    tokens processed."""
    values, gradients, fed = [], [], 0
    for which in slices(case):
        found, tokens = values_of(case, choice, views, which)
        gradients.append(flat_gradient(case, (case.advantages[which] * found).mean()))
        values.append(found.detach())
        fed += tokens
    return torch.cat(values), torch.stack(gradients), fed


class Noise(NamedTuple):
    """Signal and noise of the groups' gradients.

    Attributes:
        signal: the square of their mean over groups, corrected for the noise of draws.
        between: the variance (a trace) of a group's gradient between groups.
        within: the variance of a group's gradient between its draws.
    """

    signal: float
    between: float
    within: float


def noise_of(gradients: Tensor) -> Noise:
    """Unbiased estimates from (draws, groups, weights). Draws of different groups may depend on each other, as
    stratified draws do, so `within` is the variance of the mean over groups, times the number of groups; it is 0 for
    one draw."""
    draws, groups, _ = gradients.shape
    means, whole = gradients.mean(0), gradients.mean(1)
    mean = whole.mean(0)
    own = within = 0.0
    if draws > 1:
        own = (gradients - means).square().sum().item() / ((draws - 1) * groups)
        within = groups * (whole - mean).square().sum().item() / (draws - 1)
    between = (means - mean).square().sum().item() / (groups - 1) - own / draws
    return Noise(mean.square().sum().item() - within / (groups * draws), between, within)


def cosine(a: Tensor, b: Tensor) -> float:
    return torch.nn.functional.cosine_similarity(a, b, dim=-1).mean().item()


def measure(case: Case, choice: Choice, target: Target, draws: int) -> dict[str, Any]:
    """All measurements of a choice, over `draws` draws of its views (one if it draws nothing)."""
    rows, count = len(case.advantages), draws if choice.random else 1
    taken = [group_gradients(case, choice, draw(case, choice, number)) for number in range(count)]
    values = torch.stack([one[0] for one in taken])
    gradients = torch.stack([one[1] for one in taken])
    whole, mean = gradients.mean(1), values.mean(0)
    variance = values.var(0) if count > 1 else torch.zeros_like(mean)
    noise = noise_of(gradients)
    long = whole.mean(0)
    clear = noise.signal / long.square().sum().item()  # the share that is not noise; noise lowers the mean's cosine

    def long_cosine(to: Tensor) -> float | None:
        """None if the mean is mostly noise."""
        return min(1.0, cosine(long, to) / clear**0.5) if clear > 0.5 else None

    return {
        "draws": count,
        "bias_to_bound": (mean - target.bound).mean().item(),
        "bias_to_trajectory": (mean - target.trajectory).mean().item(),
        "bias_error": (variance.sum() / count).sqrt().item() / rows,
        "deviation": variance.mean().sqrt().item(),
        "signal": noise.signal,
        "between": noise.between,
        "within": noise.within,
        "tokens_of_update": sum(one[2] for one in taken) / count / rows,
        "cosine_to_bound": cosine(whole, target.bound_gradient),
        "cosine_to_trajectory": cosine(whole, target.trajectory_gradient),
        "long_cosine_to_bound": long_cosine(target.bound_gradient),
        "long_cosine_to_trajectory": long_cosine(target.trajectory_gradient),
    }


@torch.no_grad()
def long_run_bound(case: Case, relative_error: float, most_draws: int, chunk: int = 16) -> tuple[Tensor, float]:
    """The any-order bound (rows,) in nats per token, with as many draws as `relative_error` needs, and the relative
    standard error of its mean over rows."""
    many = Choice("", "espo", 2 * chunk, {"num_views": chunk, **PAIRS})
    batches: list[Tensor] = []
    while True:
        views = draw(case, many, LONG_RUN + len(batches))
        batches.append(torch.cat([values_of(case, many, views, which)[0] for which in slices(case)]))
        if len(batches) >= 8:
            values = torch.stack(batches)
            means = values.mean(1)
            error = (means.std() / len(means) ** 0.5 / means.mean().abs()).item()
            if error < relative_error or len(batches) * chunk >= most_draws:
                return values.mean(0), error


def slices(case: Case) -> Sequence[slice]:
    return [slice(start, start + case.group) for start in range(0, len(case.advantages), case.group)]


def long_run(case: Case, relative_error: float = 0.01, most_draws: int = 20_000, gradient_draws: int = 8) -> Target:
    """The targets of a case's estimators.

    Args:
        relative_error: of the bound's mean; draws end when it is reached, or at `most_draws`.
        gradient_draws: draws for the bound's gradient, each of 16 pairs of opposite masks.
    """
    bound, error = long_run_bound(case, relative_error, most_draws)
    many = Choice("", "espo", 32, {"num_views": 16, **PAIRS})
    drawn = [
        group_gradients(case, many, draw(case, many, 2 * LONG_RUN + number))[1].mean(0)
        for number in range(gradient_draws)
    ]
    gradients = torch.stack(drawn)
    gradient = gradients.mean(0)
    left = gradients.var(0).sum().item() / gradient_draws
    values, exact, _ = group_gradients(case, TRAJECTORY, draw(case, TRAJECTORY, 0))
    share = (left / max(gradient.square().sum().item(), 1e-30)) ** 0.5
    return Target(bound, values, gradient, exact.mean(0), error, share)
