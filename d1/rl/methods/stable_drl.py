"""StableDRL (arXiv 2603.06743): SPG's bounds, with self-normalised weights over a prompt's completions.

    loss = -sum over a prompt's completions of w A bound; w = softmax of min(bound - old bound, log ratio_cap)

Release: JianyuanZhong/StableDRL@26ad014: configs/*_spg_snis.yaml, networks/llada_svpo.py. For full fine-tuning.
Differs: old and new bounds share their masks; in the release they do not, so its weights are mask noise.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

from d1.rl.losses import Objective, sequence_log_ratios
from d1.rl.methods.entry import Page, Trained
from d1.rl.methods.shared import method
from d1.rl.methods.spg import BOUND, sandwiched

if TYPE_CHECKING:
    from d1.rl.losses import Loss, LossInputs


def stable_drl(inputs: LossInputs, settings: Any) -> Loss:
    """-sum of w A x SPG's bound over a prompt's completions, where w is the softmax of their capped log-ratios;
    averaged over prompts (StableDRL, arXiv 2603.06743)."""
    import torch

    cap = math.log(settings.ratio_cap)
    log_ratios_R = sequence_log_ratios(inputs).clamp(max=cap)
    if inputs.log_ratios is None:
        group_RK = torch.zeros_like(log_ratios_R).unsqueeze(1)
    else:
        group_RK = inputs.log_ratios.clamp(max=cap)

    # 1 on average, because the loss is a mean over rows
    weights = (log_ratios_R - group_RK.logsumexp(1)).exp() * group_RK.shape[1]
    loss = -(weights * inputs.advantages * sandwiched(inputs, settings)).mean()
    return loss, {"weight_max": weights.max().item()}


OBJECTIVES = {
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


METHOD = method(
    "StableDRL, arXiv 2603.06743",
    trained=Trained(32),
    estimator="spg",  # p_mask_perturb .15 is d1's prompt mask
    objective="stable_drl",  # w = softmax over a prompt's completions of min(bound - old bound, log ratio_cap)
    loss_type="sum",
    beta=0.0,
    num_iterations=2,
    num_views=2,  # num_mc_samples
    ratio_cap=5.0,  # ais_clip_iw
    eubo_beta=1.5,  # spg_beta
    eubo_share=0.5,  # spg_omega
    # The rate: [2e-6 on GSM8K and MATH], linear_decay, to 0; 16: 8 x repeat_times 2
    scale=dict(learning_rate=1e-06, num_generations=16, lr_scheduler_type="linear", warmup_steps=0),
    page=Page(
        paper="[2603.06743](https://arxiv.org/abs/2603.06743)",
        scores="as spg; self-normalised weights",
        release="JianyuanZhong/StableDRL@26ad014",
        largest_difference="2e-07",
        differs="old and new bounds share masks; no penalty of short boxed answers; rate 1e-6 also on GSM8K, MATH",
    ),
)
