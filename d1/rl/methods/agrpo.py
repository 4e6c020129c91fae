"""AGRPO (arXiv 2510.04019) with steps drawn uniformly: each token is scored in the state in which it was revealed.

    loss = -(1 / n) sum over n drawn steps of the sum over their tokens of min(rho A, clip(rho) A)

Release: probablyabot/agrpo@98f1182: train.yaml, agrpo_trainer.py.
Differs: one rollout per optimizer step, not per micro-batch. The release fails on a completion of EOS alone.
"""

from __future__ import annotations

from typing import Any

from d1.rl.methods.entry import Page, Trained
from d1.rl.methods.shared import canvas, method

AGRPO: dict[str, Any] = dict(
    estimator="replay",
    p_mask_prompt=0.0,
    scored_tokens="steps",  # last_step: up to the last step with a token other than EOS, also after the first EOS
    score_as_sampled=True,  # temperature, top-k and top-p of the rollout also apply to scoring
    objective="clipped_views",
    loss_type="sum",  # sum / (mc_samples x num_generations): a sum over tokens, the mean over rows
    epsilon=0.2,
    beta=0.0,
    num_iterations=1,
    temperature=0.6,
    top_k=150,
    top_p=0.99,
    remasking="random",
    max_grad_norm=1.0,
    num_views=24,  # mc_samples; low_discrepancy: random numbers are spread evenly over all draws
    mean_step=True,  # weight 1 / n, or 1 / (S n p_s) of a step s drawn with probability p_s among S steps
)
AGRPO_SCALE = dict(  # train.yaml
    learning_rate=5e-06,
    num_generations=8,
    weight_decay=0.01,
    lr_scheduler_type="cosine",
    warmup_steps=0.01,
    **canvas(tokens=384, steps=128, block=12),
)

AGRPO_TRAINED = Trained(16, lora_r=64)  # train.yaml: 8 GPUs x 8 x accumulation 2


METHOD = method(
    "AGRPO, arXiv 2510.04019, steps drawn uniformly",
    AGRPO_SCALE,
    AGRPO_TRAINED,
    **AGRPO,
    draw_steps="uniform",
    page=Page(
        paper="[2510.04019](https://arxiv.org/abs/2510.04019)",
        scores="replay of 24 steps, drawn evenly; token ratio, mean over steps",
        release="probablyabot/agrpo@98f1182",
        largest_difference="2e-07",
        differs="one rollout per optimizer step; top-p keeps the token that crosses it",
    ),
)
