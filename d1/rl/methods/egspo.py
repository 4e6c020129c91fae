"""EGSPO (arXiv 2603.12554): one ratio per step, on the eight steps of highest entropy.

    loss = -min(rho A, clip(rho) A) / (tokens of the step), rho of the product of the step's probabilities; k3 likewise

Release: vishnutez/egspo-dllm-rl@a7d618b egspo: slurm_scripts/train.yaml, train.sh, egspo_trainer.py. Differs: states
are divided among updates at random, not by rank.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from d1.rl.losses import CLIP, Objective, Penalty, clip, clip_ratio_metric, k3_of, require_logps
from d1.rl.methods.entry import Page, Trained
from d1.rl.methods.shared import method

if TYPE_CHECKING:
    from torch import Tensor

    from d1.rl.losses import Loss, LossInputs


def clipped_steps(inputs: LossInputs, settings: Any) -> Loss:
    """PPO's loss with one ratio per view, that of the product of its tokens' probabilities; divided by the number of
    these tokens and averaged over all views (EGSPO, arXiv 2603.12554)."""
    scored_RVT = inputs.scored
    # log r of a view = sum over its tokens of log p - log p_old
    log_ratios_RV = ((inputs.view_logps - require_logps(inputs.view_old)) * scored_RVT).sum(-1)
    advantages_RV = inputs.advantages.unsqueeze(1) if inputs.view_advantages is None else inputs.view_advantages
    gains_RV, clipped_RV = clip(log_ratios_RV.exp(), advantages_RV, settings)
    per_token_RV = gains_RV * scored_RVT.any(-1) / scored_RVT.sum(-1).clamp(min=1)
    return -per_token_RV.sum() / inputs.scoring_views, clip_ratio_metric(clipped_RV, scored_RVT.any(-1))


def k3_steps(inputs: LossInputs, settings: Any) -> Tensor:
    """k3 of the product of a view's probabilities, divided by its number of tokens; averaged over views (EGSPO)."""
    scored_RVT = inputs.scored
    log_d_RV = ((require_logps(inputs.view_reference) - inputs.view_logps) * scored_RVT).sum(-1)
    per_token_RV = k3_of(log_d_RV) * scored_RVT.any(-1) / scored_RVT.sum(-1).clamp(min=1)
    return per_token_RV.sum() / inputs.scoring_views


OBJECTIVES = {
    "clipped_steps": Objective(
        clipped_steps,
        per_view=True,
        by_view=True,
        weighs_views=False,
        view_advantages=True,
        settings=(*CLIP, "state_reward"),
        idle=CLIP,
    ),
}
PENALTIES = {"k3_steps": Penalty(k3_steps, settings=(), by_view=True, weighs_views=False)}


EGSPO: dict[str, Any] = dict(
    estimator="replay",
    p_mask_prompt=0.0,
    scored_tokens="canvas",
    objective="clipped_steps",  # one ratio per step, of the product of its tokens' probabilities
    loss_type="views",
    epsilon=0.2,  # train.sh EPSILON
    kl="k3_steps",
    beta=0.04,  # train.yaml
    num_iterations=4,  # egspo_trainer.py: 4 optimizer steps per rollout, each on 2 of the 8 states
    split_views=True,
    num_views=8,  # train.yaml logps_eval_num_steps
    draw_steps="top",  # logps_eval_time_steps_mode high_entropy: unweighted, so biased by design
    epsilon_high=0.5,  # train.sh EPSILON_HIGH
)
EGSPO_SCALE = dict(learning_rate=3e-05, num_generations=8)  # train.yaml, train.sh
EGSPO_TRAINED = Trained(6, lora_r=128, in_4bit=True)  # 4 nodes x 2 GPUs x 6; both accumulated steps have these rows


METHOD = method(
    "EGSPO, arXiv 2603.12554",
    EGSPO_SCALE,
    EGSPO_TRAINED,
    **EGSPO,
    page=Page(
        paper="[2603.12554](https://arxiv.org/abs/2603.12554)",
        scores="replay of the 8 most uncertain steps; ratio per step; k3",
        release="vishnutez/egspo-dllm-rl@a7d618b",
        largest_difference="2e-07",
        differs="states divided among updates at random",
    ),
)
