"""BGPO (arXiv 2510.11683), as in DARE: a bound on the ratio of each draw's bound of the log-probability.

    loss = -mean over draws of (1 + d) A for A > 0, exp(d) A else; d: log-ratio of the bounds / L

Release: yjyddq/DARE@83ae8a3: verl/trainer/ppo/dllm_core_algos.py, run_bgpo_*.sh. Differs: z as in cj-grpo; the mean is
over rows.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from d1.rl.losses import CLIP, Objective, clip, clip_ratio_metric, draws_log_ratios
from d1.rl.methods.cj_grpo import DARE, DARE_SCALE, DARE_TRAINED
from d1.rl.methods.entry import Page
from d1.rl.methods.shared import canvas, method

if TYPE_CHECKING:
    from d1.rl.losses import Loss, LossInputs


def bgpo(inputs: LossInputs, settings: Any) -> Loss:
    """BGPO's loss, the mean over draws (arXiv 2510.11683, section 3). d is a draw's log-ratio of bounds per token.

    The ratio exp(d) is replaced by its lower bound 1 + d if A > 0, and kept if A <= 0.
    """
    import torch

    d_RD, advantages = draws_log_ratios(inputs), inputs.advantages.unsqueeze(1)
    gains_RD, clipped_RD = clip(torch.where(advantages > 0, 1 + d_RD, d_RD.exp()), advantages, settings)
    taking_part_RD = inputs.mask.bool().any(1, keepdim=True).expand_as(clipped_RD)
    return -(gains_RD * taking_part_RD).mean(), clip_ratio_metric(clipped_RD, taking_part_RD)


OBJECTIVES = {
    "bgpo": Objective(bgpo, per_view=True, per_draw=True, per_row=True, settings=CLIP, idle=CLIP),
}


METHOD = method(
    "BGPO, arXiv 2510.11683, as in DARE",
    trained=DARE_TRAINED,
    **DARE,
    estimator="counts",  # exactly x hidden tokens, weight G / x
    scored_tokens="canvas",
    objective="bgpo",  # section 3: 1 + d for A > 0, else exp(d); the release's log(1 + d) is NaN for d < -1
    loss_type="sum",
    num_views=16,
    stratified=True,  # x spread evenly over 1..G
    delta=3.0,  # a second clip for A < 0
    scale=dict(**DARE_SCALE, **canvas(tokens=512, steps=256, block=32)),
    page=Page(
        paper="[2510.11683](https://arxiv.org/abs/2510.11683)",
        scores="ELBO, 16 exact counts; bound on each draw's ratio",
        release="yjyddq/DARE@83ae8a3",
        largest_difference="5e-04",
        differs="1 + d without a logarithm; mean over rows; sampler and z as in `cj-grpo`",
    ),
)
