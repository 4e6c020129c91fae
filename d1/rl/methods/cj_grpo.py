"""CJ-GRPO (arXiv 2509.23924), as in DARE: each token is scored in the state in which it was revealed.

    loss = -min(rho A, clip(rho) A) per token: the mean over a step's tokens, then over steps

Release: yjyddq/DARE@83ae8a3: verl/workers/actor/llada_dp_actor_cj_grpo.py. Differs: exact sampler; z adds 1e-4, not
1e-6, to s. The authors' first code (yjyddq/EOSER-ASS-RL) has clip .5, beta .04 for k3, A = r - m, T 1 and mu 12 [8].
"""

from __future__ import annotations

from typing import Any

from d1.rl.methods.entry import Page, Trained
from d1.rl.methods.shared import CONSTANT, canvas, method

# What the methods of DARE share (bgpo, ebpo): train_batch_size 16, all weights
DARE_TRAINED = Trained(16)
# DARE, yjyddq/DARE@83ae8a3: recipe/llada/run_*.sh
DARE: dict[str, Any] = dict(
    p_mask_prompt=0.0,
    epsilon=0.2,
    beta=0.0,
    scale_rewards="group",  # z
    num_iterations=1,
    temperature=0.6,  # [1.0 in the Math-Hard recipes and in those of SDAR]
    max_grad_norm=1.0,
)
DARE_SCALE = dict(learning_rate=5e-07, num_generations=8, **CONSTANT | dict(weight_decay=0.01))


METHOD = method(
    "CJ-GRPO, arXiv 2509.23924, as in DARE",
    trained=DARE_TRAINED,
    **DARE,
    estimator="replay",  # every step
    scored_tokens="canvas",
    objective="clipped_views",
    loss_type="views",  # the mean over a step's tokens, then over steps
    delta=3.0,  # a second clip for A < 0
    scale=dict(**DARE_SCALE, **canvas(tokens=256, steps=128, block=32)),
    page=Page(
        paper="[2509.23924](https://arxiv.org/abs/2509.23924)",
        scores="replay of every step; token ratio",
        release="yjyddq/DARE@83ae8a3",
        largest_difference="5e-04",
        differs="exact sampler (DARE: cache; on block models a threshold); z adds 1e-4, not 1e-6",
    ),
)
