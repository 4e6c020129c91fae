"""LightningRL, for block-causal models: rewards of being right and of few forward passes, each normalised on its own.

    loss = -min(rho A, clip(rho) A) + beta k3, and - nll_weight l if the completion is right: the mean of a completion's
        tokens, then of the kept completions

A: z over a rollout's kept completions of (z of right, 0 or 1) + (z of tokens per forward pass), each of the two within
its prompt. Prompts without a right completion, or whose tokens per forward pass lie within 0.01, are dropped.

Release: SJTU-DENG-Lab/LightningRL@e4d7d29: configs/lightningrl.yaml, reward/rl_reward.py, models/sdar/modeling_sdar.py.
Its micro-batches have one row per device, so that its means over the tokens of a micro-batch are those of a row.
Differs: 4 optimizer steps per rollout; the release meant one per 64 rows and makes one per 8, up to 512 for its
128 x 32 completions (--num_mini_batches), with a new optimizer for each rollout. z adds 1e-4 to a standard deviation
(TRL). The canvas is as configured, not 8192 tokens. Tokens per forward pass count every pass of the row, also one that
reveals nothing. Not copied: "right", in the last term, as a total reward of at least 0, by which fast wrong completions
are imitated (right is the paper's word); training blocks of another size than the sampler's. Left out: the rule that a
completion within 5 tokens of the limit is wrong.

`d1 rl` makes both rewards (`accuracy_reward`, `speed_reward`). A trainer of your own gets them as `reward_funcs`:
`tokens_per_forward_pass` and `accuracy_of` of d1/rl/rewards.py, with `reward_weights=[1.0, 1.0]`.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from d1.rl.losses import CLIP, Advantage, Objective, clipped_views, reduce_loss
from d1.rl.methods.entry import Page, Trained
from d1.rl.methods.shared import CONSTANT, THRESHOLD, method

if TYPE_CHECKING:
    from torch import Tensor

    from d1.rl.losses import Loss, LossInputs


def clipped_views_nll(inputs: LossInputs, settings: Any) -> Loss:
    """`clipped_views`, plus `settings.nll_weight` times -log p of the right completions, averaged in the same way over
    all completions (LightningRL)."""
    if inputs.is_right is None:
        raise ValueError("is_right is missing: an entry needs reads_right=True")
    loss, metrics = clipped_views(inputs, settings)
    counted_RVT = inputs.weights * inputs.mask.unsqueeze(1) * inputs.is_right[:, None, None]
    nll = reduce_loss(-(counted_RVT * inputs.view_logps).sum(-1), inputs, settings)
    return loss + settings.nll_weight * nll, metrics | {"nll": nll.item()}


# Rewards of one group that are all equal leave residues of rounding in its advantages, about 1e-7.
MIN_DEVIATION = 1e-6


def standardised_batch(advantages: Tensor) -> Tensor:
    """Advantages minus their mean, divided by their standard deviation (divisor n - 1), over all groups together; 0
    where the deviation is 0 up to rounding (LightningRL). NaN, a completion without a reward, is left out."""
    rewarded = advantages[~advantages.isnan()]
    deviation = rewarded.std()
    standardised = (advantages - rewarded.mean()) / deviation
    return standardised.where(deviation > MIN_DEVIATION, 0.0).nan_to_num(0.0, 0.0, 0.0)


OBJECTIVES = {
    "clipped_views_nll": Objective(
        clipped_views_nll,
        per_view=True,
        by_view=True,
        reads_right=True,
        settings=("loss_type", *CLIP, "sampling_weight_cap", "nll_weight"),
        idle=CLIP,
    ),
}
ADVANTAGES = {
    "standardised_batch": Advantage(standardised_batch, settings=(), centred=False, kept_only=True, over_rollout=True),
}


METHOD = method(
    "LightningRL, for block-causal models",
    # batch_size_policy 8 with split_batches; the accumulation of 8 is never entered. A rollout has 128 prompts
    trained=Trained(8 / 32),
    **THRESHOLD,  # remasking_strategy low_confidence_dynamic, as many denoising_steps_per_block as tokens
    estimator="one_step",  # every block hidden, earlier ones clean; the step map is not read
    p_mask_prompt=0.0,
    objective="clipped_views_nll",
    loss_type="views",  # policy_reduction_mode sequence: the mean of a row's tokens (one view), then of the kept rows
    nll_weight=0.1,  # nll_loss_weight, nll_reduction_mode token
    epsilon=0.2,  # eps, eps_high
    kl="k3",  # kl_estimator, kl_reduction_mode token
    beta=0.01,  # kl_beta
    accuracy_reward=True,  # acc_norm
    speed_reward=1.0,  # tpf_norm_mode z_score
    multi_objective_aggregation="normalize_then_sum",
    advantage="standardised_batch",  # adv_norm_mode batch, of the kept rows
    right_share=[1e-6, 1.0],  # filter_all_wrong; prompts with only right completions stay
    min_speed_spread=0.01,  # filter_tpf_threshold
    num_iterations=1,  # num_train_epochs
    num_mini_batches=4,
    temperature=1.0,
    max_grad_norm=1.0,
    reveal_level=0.9,  # dynamic_threshold
    scale=dict(
        learning_rate=1e-06,
        num_generations=32,  # num_response_per_task
        **CONSTANT | dict(lr_scheduler_type="constant_with_warmup", warmup_steps=10),
    ),
    page=Page(
        paper="[LightningRL](https://github.com/SJTU-DENG-Lab/LightningRL)",
        scores="one view, all hidden, block-causal models; token ratio; k3; -log p of right completions",
        release="SJTU-DENG-Lab/LightningRL@e4d7d29",
        largest_difference="5e-04",
        differs=(
            "4 optimizer steps per rollout, not one per 8 completions; the last term is of right completions, not of "
            "rewards of at least 0; z adds 1e-4; own canvas; no rule on length"
        ),
    ),
)
