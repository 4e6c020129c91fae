"""EBPO, of LLaDA2.1 (arXiv 2602.08676), for block-causal models, as in DARE: one ratio of bounds per completion.

    loss = -min(rho A, clip(rho) A), rho = exp(B - old), not divided by the length

Release: yjyddq/DARE@83ae8a3: verl/trainer/ppo/dllm_core_algos.py. Differs: z as in cj-grpo; the grids of hidden
shares of all rows are interleaved.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

from d1.rl.losses import CLIP, Objective, clip_ratio_metric
from d1.rl.methods.cj_grpo import DARE, DARE_SCALE, DARE_TRAINED
from d1.rl.methods.entry import Page
from d1.rl.methods.shared import THRESHOLD, method

if TYPE_CHECKING:
    from d1.rl.losses import Loss, LossInputs


def clipped_sequences(inputs: LossInputs, settings: Any) -> Loss:
    """PPO's loss with one ratio per completion, exp(bound - old bound), not divided by the length (EBPO, of
    LLaDA2.1)."""
    import torch

    log_ratios = ((inputs.logps - inputs.old) * inputs.mask).sum(-1)
    positive = inputs.advantages >= 0
    # Clip logarithms, so that a clipped ratio cannot overflow.
    high = math.log1p(settings.epsilon if settings.epsilon_high is None else settings.epsilon_high)
    low = math.log1p(-settings.epsilon) if settings.epsilon < 1 else -math.inf
    held = torch.where(positive, log_ratios.clamp(max=high), log_ratios.clamp(min=low))
    clipped, taking_part = (held != log_ratios) & (inputs.advantages != 0), inputs.mask.bool().any(-1)
    return -(inputs.advantages * held.exp() * taking_part).mean(), clip_ratio_metric(clipped, taking_part)


OBJECTIVES = {
    "clipped_sequences": Objective(clipped_sequences, per_row=True, settings=CLIP[:2], idle=CLIP[:2]),
}


METHOD = method(
    "EBPO, of LLaDA2.1, for block-causal models, as in DARE",
    trained=DARE_TRAINED,
    **DARE,
    **THRESHOLD,  # SGLang's LowConfidence
    estimator="counts",  # exactly x hidden tokens per block of length len, weight len / x
    objective="clipped_sequences",  # exp(ELBO - old), not divided by the length
    loss_type="sum",
    num_views=16,
    stratified=True,  # the shares x / len, over all draws and blocks
    reveal_level=0.95,  # recipe/llada2_mini/sglang_low_confidence_llada2.yaml, recipe/sdar/..._sdar.yaml
    scale=DARE_SCALE,
    page=Page(
        paper="[2602.08676](https://arxiv.org/abs/2602.08676)",
        scores="ELBO, 16 exact counts, block-causal models; sequence ratio",
        release="yjyddq/DARE@83ae8a3",
        largest_difference="5e-04",
        differs="grids of hidden shares interleaved over rows; z as in `cj-grpo`; own canvas (recipes: 2,048 tokens)",
    ),
)
