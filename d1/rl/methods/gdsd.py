"""GDSD (arXiv 2605.29398), as its code is written: the log-ratio of a completion is moved towards its advantage.

    loss = sum over draws of (clamp(l - old, log(1 +- epsilon)) / G - 10 A)^2 + beta k2

Release: GaryBall/GDSD@3fb6780: scripts/train_gdsd.yaml, run_gdsd_llada_gsm8k.sh, gdsd_trainer_batchll.py. Differs:
counts are spread over all rows of the rollout.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

from d1.rl.losses import Objective, Penalty, clip_ratio_metric, draws_log_ratios, require_logps
from d1.rl.methods.entry import Page, Trained
from d1.rl.methods.espo import ESPO_OPTIMIZER
from d1.rl.methods.shared import canvas, method
from d1.scoring import Estimator
from d1.scoring.entry import always, two_per_draw

if TYPE_CHECKING:
    from torch import Tensor

    from d1.rl.losses import Loss, LossInputs
    from d1.scoring import Randomness, SampledRows, Views, ViewSettings

# The estimator: a random mask of x tokens and its complement, each token with weight 1/2: half the sum of the
# log-probabilities, each token scored in the one view that hides it. This is not a bound.


def draw_complements(sampled: SampledRows, random: Randomness, settings: ViewSettings) -> Views:
    import torch

    from d1.scoring.elbo import ranks_of_tokens, uniform_counts, weighted_views
    from d1.scoring.inputs import draw_hidden_prompt

    counts = uniform_counts(sampled, random, settings)
    hidden = ranks_of_tokens(sampled, random, settings.draws) < counts.unsqueeze(-1)
    hidden_prompt = draw_hidden_prompt(sampled, random, settings.p_mask_prompt, 2 * settings.draws)
    weights = torch.full_like(counts, 1 / settings.draws, dtype=torch.float)
    return weighted_views(hidden_prompt, hidden, sampled.scored, weights, weights, antithetic=True)


def gdsd(inputs: LossInputs, settings: Any) -> Loss:
    """(clamp(log r) / L - 10 A)^2 for the log-ratio of each draw, summed over draws (GDSD, arXiv 2605.29398).

    As in the published code, the log-ratio of the whole completion is clamped at log(1 +- epsilon), and the target lies
    far outside. So the gradient is that of -20 A log p / L inside the clamp, up to a millionth, and 0 outside.
    """
    log_ratios_RD = draws_log_ratios(inputs) * inputs.lengths.unsqueeze(1)
    held_RD = log_ratios_RD.clamp(math.log1p(-settings.epsilon), math.log1p(settings.epsilon))
    taking_part_RD = inputs.mask.bool().any(1, keepdim=True).expand_as(held_RD)
    distance_RD = held_RD / inputs.lengths.unsqueeze(1) - 10 * inputs.advantages.unsqueeze(1)
    return (distance_RD**2 * taking_part_RD).sum(1).mean(), clip_ratio_metric(held_RD != log_ratios_RD, taking_part_RD)


def k2_draws(inputs: LossInputs, settings: Any) -> Tensor:
    """k2 of each draw's whole log-probability, divided by the completion's length; averaged over draws (GDSD)."""
    gaps_RVT = require_logps(inputs.view_reference) - inputs.view_logps
    log_d_RD = inputs.by_draw(inputs.weights * gaps_RVT * inputs.mask.unsqueeze(1))
    log_d_RD = log_d_RD.shape[1] * log_d_RD  # as in `draws_log_ratios`
    return (log_d_RD**2 / 2 / inputs.lengths.unsqueeze(1)).mean()


ESTIMATORS = {
    "complements": Estimator(
        draw_complements,
        two_per_draw,
        covers=always,
        views_per_draw=lambda settings: 2,
        settings=("num_views", "stratified"),
    ),
}
OBJECTIVES = {
    "gdsd": Objective(gdsd, per_view=True, per_draw=True, per_row=True, settings=("epsilon",), idle=("epsilon",)),
}
PENALTIES = {"k2_draws": Penalty(k2_draws, settings=(), per_row=True)}


METHOD = method(
    "GDSD, arXiv 2605.29398, as its code is written",
    trained=Trained(20, lora_r=128),  # in bf16; 8 GPUs x 10 x accumulation 4
    estimator="complements",  # a mask over the canvas and its complement, the mean of both
    p_mask_prompt=0.0,
    scored_tokens="canvas",
    objective="gdsd",  # (clamp(l - old, log(1 +- epsilon)) / G - 10 A)^2; PSI=10.0
    loss_type="sum",  # over draws
    epsilon=4e-4,  # train_gdsd.yaml: six orders of magnitude below the target
    kl="k2_draws",
    beta=0.001,  # BETA_KL_DIV
    advantage="leave_one_out",
    num_iterations=8,
    temperature=1.0,
    num_views=2,  # SAMPLE_STEPS
    stratified=True,
    # 16: WORLD_SIZE * 2 on 8 GPUs
    scale=dict(learning_rate=3e-06, num_generations=16, **ESPO_OPTIMIZER, **canvas(tokens=256, steps=256, block=32)),
    page=Page(
        paper="[2605.29398](https://arxiv.org/abs/2605.29398)",
        scores="as espo; squared distance; k2",
        release="GaryBall/GDSD@3fb6780",
        largest_difference="1e-08",
        differs="counts spread over all rows, the two of a row half a canvas apart",
    ),
)
