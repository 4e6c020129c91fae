"""SLIM-RL, for block-causal models: PPO with one ratio per view, of views that hide early blocks more than late ones.

    loss = -w min(rho A, clip(rho) A) + beta w (sum over a view's tokens of k3 to old) / G: the mean over views

rho: exp(mean over a view's scored tokens of l - old); w: the weight of the view's quadrature node; A = r - m. Rollouts
reveal by the rule `risk_budget` (d1/sampling/reveal.py).

Release: laolaorkkkkk/SLIM-RL@0c4960b: configs/multinode_slim_rl_sdar.yaml, train/utils.py, train/slim_rl_sdar.py. As
there, the mean counts each view as a row, so that the loss is a third of the quadrature. Differs: 4 optimizer steps per
rollout; the release makes one per 8 views, 384 for its 128 x 8 completions (--num_mini_batches), with a new optimizer
for each rollout. The divisor G, and the number of blocks, are those of the canvas; the release takes the longest
completion of a rollout. A view hides at least one scored token, not one that may be padding. Not copied: blocks that
begin with the completion where the sampler's begin with the text; rewards that belong to other completions once a
long prompt is left out. Left out: the rule that a completion within 5 tokens of the limit is wrong.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from d1.rl.losses import CLIP, Objective, Penalty, clip, clip_ratio_metric, k3_of, require_logps
from d1.rl.methods.entry import Page, Trained
from d1.rl.methods.gdpo import NODES, quadrature
from d1.rl.methods.shared import CONSTANT, THRESHOLD, method
from d1.rl.methods.tracerl import RIGHT_SHARE
from d1.scoring import Estimator

if TYPE_CHECKING:
    from torch import Tensor

    from d1.rl.losses import Loss, LossInputs
    from d1.scoring import Randomness, SampledRows, Views, ViewSettings

# --- The estimator ----------------------------------------------------------------------------------------------------
#
# One view per node t of a Gauss-Legendre quadrature (`gdpo.py`). It hides each token independently, in block j of
# 0..b-1 with probability t + s (1 - cos(pi (b - 1 - j) / (b - 1))) / 2 - s / 2: from t + s / 2 in the first block to
# t - s / 2 in the last. A hidden token has the weight w of the node, not w / t: the weighted sum is no estimate of a
# log-probability, it only weighs the views.

SPREAD = 0.2  # s, the difference between the first and the last block, if 0 and 1 are further away; mask_spread


def hiding_probabilities(times: Tensor, blocks: Tensor) -> Tensor:
    """(rows, views, canvas) fp64, the probability that a view hides a token.

    Args:
        times: (views,) the nodes, fp64.
        blocks: (rows, canvas) the number of each token's block, from 0.
    """
    import torch

    last_R1 = blocks.amax(1, keepdim=True)
    from_the_end_RT = (last_R1 - blocks) / last_R1.clamp(min=1)
    curve_RT = (1 - torch.cos(torch.pi * from_the_end_RT.double())) / 2 - 0.5
    curve_RT = torch.where(last_R1 == 0, 0.0, curve_RT)  # a single block is hidden with probability t
    spread_V = (2 * torch.minimum(times, 1 - times) - 1e-6).clamp(max=SPREAD)
    return times[:, None] + spread_V[:, None] * curve_RT.unsqueeze(1)


def draw_block_gauss(sampled: SampledRows, random: Randomness, settings: ViewSettings) -> Views:
    import torch

    from d1.scoring.elbo import numbers_of_tokens
    from d1.scoring.inputs import draw_hidden_prompt
    from d1.scoring.views import views_of_canvas

    scored, device = sampled.scored, sampled.scored.device
    times, parts = quadrature()
    blocks = sampled.block_numbers
    if sampled.blocks is None:  # a model without blocks: those of the sampler
        blocks = (torch.arange(scored.shape[1], device=device) // settings.block_length).expand(len(scored), -1)

    probabilities_RVT = hiding_probabilities(times.to(device), blocks)
    numbers_RVT = numbers_of_tokens(sampled, random, NODES).double()
    hidden_RVT = numbers_RVT < probabilities_RVT

    # A view that hides nothing hides one token at random: the numbers of visible tokens, rescaled, are uniform.
    rescaled_RVT = (numbers_RVT - probabilities_RVT) / (1 - probabilities_RVT)
    first_RVT = torch.zeros_like(hidden_RVT).scatter(-1, rescaled_RVT.argmin(-1, keepdim=True), True)
    hidden_RVT = torch.where(hidden_RVT.any(-1, keepdim=True), hidden_RVT, first_RVT)

    hidden_prompt = draw_hidden_prompt(sampled, random, settings.p_mask_prompt, NODES)
    weights = parts.to(device).float().expand(len(scored), -1).unsqueeze(-1)
    return views_of_canvas(hidden_prompt, hidden_RVT, scored, weights)


ESTIMATORS = {"block_gauss": Estimator(draw_block_gauss, lambda settings: NODES, settings=())}

# --- Objective and penalty --------------------------------------------------------------------------------------------


def view_weights(inputs: LossInputs) -> Tensor:
    """(rows, views) the weight of each view, 0 for a view that scores nothing."""
    return (inputs.weights * inputs.scored).amax(-1)


def clipped_view_means(inputs: LossInputs, settings: Any) -> Loss:
    """PPO's loss with one ratio per view, the geometric mean of its tokens' ratios; the mean over views (SLIM-RL)."""
    scored_RVT = inputs.scored
    sums_RV = ((inputs.view_logps - require_logps(inputs.view_old)) * scored_RVT).sum(-1)
    means_RV = sums_RV / scored_RVT.sum(-1).clamp(min=1)
    gains_RV, clipped_RV = clip(means_RV.clamp(-10, 10).exp(), inputs.advantages.unsqueeze(1), settings)
    loss = -(view_weights(inputs) * gains_RV).sum() / inputs.scoring_views
    return loss, clip_ratio_metric(clipped_RV, scored_RVT.any(-1))


def k3_per_canvas(inputs: LossInputs, settings: Any) -> Tensor:
    """k3 to the policy that sampled, summed over a view's tokens, divided by the canvas and weighed like the view; the
    mean over views (SLIM-RL)."""
    k3_RVT = k3_of(require_logps(inputs.view_old) - inputs.view_logps) * inputs.scored
    sums_RV = view_weights(inputs) * k3_RVT.sum(-1)
    return sums_RV.sum() / inputs.scoring_views / settings.max_completion_length


OBJECTIVES = {
    "clipped_view_means": Objective(clipped_view_means, per_view=True, by_view=True, settings=CLIP, idle=CLIP),
}
PENALTIES = {"k3_per_canvas": Penalty(k3_per_canvas, to="old", settings=(), by_view=True)}


METHOD = method(
    "SLIM-RL, for block-causal models",
    # batch_size_lm 8 with split_batches: 8 views per optimizer step, 3 per completion. A rollout has 128 prompts
    trained=Trained(1 / 3),
    **THRESHOLD | dict(reveal="risk_budget"),  # remasking_strategy tau_budget_dynamic
    estimator="block_gauss",  # num_quadrature_points 3, mask_increasing False
    p_mask_prompt=0.0,
    scored_tokens="text",  # post_num 0: padding is not scored
    objective="clipped_view_means",  # importance_sampling_level sequence
    loss_type="views",  # not read: the mean is over views
    epsilon=0.1,  # clip_ratio_low, clip_ratio_high
    kl="k3_per_canvas",  # kl_estimator k3
    beta=0.01,
    right_share=RIGHT_SHARE,  # [0.2, 0.8], as rl_reward.py; on code only prompts with equal rewards are dropped
    num_iterations=1,  # num_train_epochs
    num_mini_batches=4,
    temperature=1.0,
    max_grad_norm=1.0,
    reveal_level=0.9,  # dynamic_threshold, with tau_budget_m 1
    # 1024 tokens for code; its cosine with min_lr_scale 1.0 is constant
    scale=dict(learning_rate=1e-06, num_generations=8, max_completion_length=256, block_length=16, **CONSTANT),
    page=Page(
        paper="[SLIM-RL](https://github.com/laolaorkkkkk/SLIM-RL)",
        scores="3 nodes, early blocks hidden more, block-causal models; ratio per view; k3 to old",
        release="laolaorkkkkk/SLIM-RL@0c4960b",
        largest_difference="2e-07",
        differs=(
            "4 optimizer steps per rollout, not one per 8 views; divided by the canvas; blocks of the sampler; no rule "
            "on length"
        ),
    ),
)
