"""JustGRPO for models with blocks, as in NeMo-RL: from left to right within each block.

    loss = -min(rho A, clip(rho) A) + beta k3 per token / number of scored tokens; weights of sampling up to 2

Release: NVIDIA-NeMo/RL@749b0ed research/just_grpo, for Nemotron-Labs-Diffusion-3B:
just_grpo-sudoku6x6-4n8g-megatron-inference-long.yaml, grpo_math_1B.yaml. Differs: there, mask tokens before the prompt
fill its last block, and are seen; here blocks begin at the prompt's end.
"""

from __future__ import annotations

from typing import Any

from d1.rl.methods.entry import Page, Trained
from d1.rl.methods.shared import method

JUST_GRPO_BLOCKS: dict[str, Any] = dict(
    estimator="left_to_right",  # view k hides the tokens from place k on in each block, and scores that at k
    p_mask_prompt=0.0,
    objective="clipped_views",
    loss_type="scored",  # token_level_loss: the sum over selected tokens / their number
    epsilon=0.2,  # ratio_clip_min and max
    beta=0.01,  # reference_policy_kl_penalty, k3
    advantage="leave_one_out",  # use_leave_one_out_baseline; normalize_rewards is off
    num_iterations=1,
    temperature=1.0,
    remasking="leftmost",  # selection_policy
    diffusion_steps=None,  # max_steps: one per token
    first_token="masked",  # blocks begin fully masked
    sampling_weight_cap=2.0,  # truncated_importance_sampling_ratio
    max_grad_norm=1.0,
)
JUST_GRPO_BLOCKS_SCALE: dict[str, Any] = dict(
    learning_rate=3e-07,
    num_generations=8,
    weight_decay=0.01,
    adam_beta2=0.999,
    lr_scheduler_type="constant_with_warmup",
    warmup_steps=13,
    max_completion_length=512,
    block_length=16,
)


METHOD = method(
    "JustGRPO for models with blocks, as in NeMo-RL",
    trained=Trained(128),  # num_prompts_per_step
    **JUST_GRPO_BLOCKS,
    scale=JUST_GRPO_BLOCKS_SCALE,
    page=Page(
        paper="[NeMo-RL](https://github.com/NVIDIA-NeMo/RL)",
        scores="left to right in blocks of 16; k3",
        release="NVIDIA-NeMo/RL@749b0ed",
        largest_difference="5e-07",
        differs="no mask tokens before the prompt",
    ),
)
