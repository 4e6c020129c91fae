"""DiPO, of DiRL, for block-causal models: replay of every step.

    loss = -min(rho A, clip(rho) A) per token / (sum over completions of L times its rounds, / block)

Release: OpenMOSS/DiRL@ec4bfb3: configs/rl.yaml, scripts/dapo.sh, train/dapo.py; clip as in modeling_sdar.py. Differs:
the canvas is as configured, not 8192 tokens. Dropped prompts are replaced in at most 12 rounds of a rollout each; the
release has rounds of three times this size, and no limit. It samples at least 128 tokens, and takes rows in the order
of their file (--shuffle_dataset false).
"""

from __future__ import annotations

from d1.rl.methods.entry import Page, Trained
from d1.rl.methods.shared import CONSTANT, THRESHOLD, method

METHOD = method(
    "DiPO, of DiRL, for block-causal models",
    trained=Trained(128),  # num_task_per_step
    **THRESHOLD,  # REMASKING_STRATEGY low_confidence_dynamic, as many DENOISING_STEPS_PER_BLOCK as tokens
    estimator="replay",  # every step: one view holds the k-th step of every block
    p_mask_prompt=0.0,
    objective="clipped_views",
    # Of a device: every round of a completion repeats its labels, and the sum over rounds is divided by the block.
    loss_type="rounds",  # the sum / (sum over completions of L times its rounds, / block); rounds: its views
    epsilon=0.2,
    beta=0.0,  # KL
    advantage="standardised",
    num_iterations=1,  # ITERATIONS
    temperature=1.0,
    top_k=50,
    max_grad_norm=1.0,
    epsilon_high=0.28,
    right_share=[1e-6, 1 - 1e-6],  # prompts with only correct or only wrong completions are dropped
    refills=12,
    reveal_level=0.9,  # DYNAMIC_THRESHOLD
    scale=dict(learning_rate=1e-06, num_generations=8, **CONSTANT | dict(lr_scheduler_type="constant_with_warmup")),
    page=Page(
        paper="[DiRL](https://github.com/OpenMOSS/DiRL)",
        scores="replay, block-causal models; token ratio",
        release="OpenMOSS/DiRL@ec4bfb3",
        largest_difference="2e-07",
        differs="at most 12 `refills`; own canvas; no warm-up, no minimum of 128 tokens",
    ),
)
