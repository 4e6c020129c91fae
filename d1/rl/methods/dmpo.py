"""DMPO (arXiv 2510.08233): the policy is moved towards the reference, tilted by exp(reward / .04).

    loss = -A x mean over the 4 views of (sum of l of the hidden tokens) / m
    A = softmax(D + r / .04) - softmax(D - r / .04) over the group, D = B_ref - B_old
    B = mean over the 4 views of (sum of l of the hidden tokens) x G / m

m: tokens that a view hides. The views are two random masks of the canvas and their complements; B_ref and B_old share
theirs, which no update uses. D is the importance weight of a completion between the reference and the policy that
sampled it. The loss has no ratio, clip or KL.

Release: yuchen-zhu-zyc/DMPO@96af1a4 DMPO: dmpo_train_config.yaml, which its README's command uses, dmpo_trainer.py.
Differs:
- Advantages are multiplied by the size of the group, and the loss is the mean over rows: the mean over prompts of the
  sums over groups. The release's loss is this one times rows per device / 16, 1/2 in its yaml: its loss depends on the
  number of devices, and its gradients are clipped at .2 after that.
- Rollouts and B_old are computed without dropout, which the release leaves on (its LoRA has .05).
- Not copied: `loss_mask_non_eos` (off there) inverts an integer mask. Not here: the baselines, the temperature by
  effective sample size and the loss `ddo` of the release, which its settings turn off; its first code (@50ebd3e), which
  computes D in the sampler's own states.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from d1.rl.losses import Advantage, AdvantageInputs, require_logps
from d1.rl.methods.entry import Page, Trained
from d1.rl.methods.shared import canvas, method
from d1.scoring import Estimator
from d1.scoring.entry import always, two_per_draw

if TYPE_CHECKING:
    from torch import Tensor

    from d1.scoring import Randomness, SampledRows, Views, ViewSettings

# The estimator: `num_views` random masks and their complements. A mask hides each token with a probability uniform on
# [.1, 1), which a comment of the release calls [.1, .9]; a complement hides the others. The weights of a view sum to
# 1 / (number of views): a mean log-probability per token, not a bound.

LOWEST = 0.1


def opposite_mask_views(hidden_prompt: Tensor, hidden: Tensor, scored: Tensor) -> Views:
    """Views that hide `hidden` (rows, masks, canvas) of the scored tokens, then those that hide the others; each weighs
    1 / (views x hidden tokens). A view that hides nothing scores nothing."""
    import torch

    from d1.scoring.views import views_of_canvas

    hidden = torch.cat([hidden, ~hidden], dim=1)
    counts = (hidden & scored.unsqueeze(1)).sum(-1, keepdim=True).clamp(min=1)
    return views_of_canvas(hidden_prompt, hidden, scored, 1 / (hidden.shape[1] * counts))


def draw_opposite_masks(sampled: SampledRows, random: Randomness, settings: ViewSettings) -> Views:
    import torch

    from d1.masking import draw_masks
    from d1.scoring.inputs import draw_hidden_prompt

    chances = LOWEST + (1 - LOWEST) * random.uniform(settings.draws)
    masks = [draw_masks(sampled.scored, of_mask, random.generators) for of_mask in chances.unbind(1)]
    hidden_prompt = draw_hidden_prompt(sampled, random, settings.p_mask_prompt, 2 * settings.draws)
    return opposite_mask_views(hidden_prompt, torch.stack(masks, dim=1), sampled.scored)


def tilted_softmax(inputs: AdvantageInputs, settings: Any) -> Tensor:
    """softmax(D + r / temperature) - softmax(D - r / temperature) over the group, times the group's size, because the
    loss is a mean over rows. A reward minus its group's mean has the softmax of the reward."""
    group = inputs.advantages.shape[1]
    # The estimator's weights sum to 1, and the bound is over all tokens.
    change = require_logps(inputs.lengths) * (require_logps(inputs.reference_bounds) - require_logps(inputs.old_bounds))
    tilt = inputs.advantages / settings.reward_temperature
    return group * ((change + tilt).softmax(1) - (change - tilt).softmax(1))


ESTIMATORS = {
    "opposite_masks": Estimator(
        draw_opposite_masks,
        two_per_draw,
        partial=always,
        covers=always,
        settings=("num_views",),
    ),
}
ADVANTAGES = {
    "tilted_softmax": Advantage(tilted_softmax, reads=("old", "reference"), settings=("reward_temperature",)),
}


METHOD = method(
    "DMPO, arXiv 2510.08233",
    trained=Trained(8, lora_r=128, in_4bit=True),  # dmpo_train_config.yaml: 8 GPUs x 8 x accumulation 2 / 16
    estimator="opposite_masks",  # num_replicates 4, loss_antithetic, loss_mask_prob_clamp
    p_mask_prompt=0.0,
    scored_tokens="canvas",  # loss_mask_non_eos is off
    objective="reinforce",  # weighted denoising cross-entropy (wdce): no ratio, no clip
    loss_type="sum",
    beta=0.0,
    advantage="tilted_softmax",  # advantage_centering_neg: w+ - w-
    reward_temperature=0.04,  # alpha
    num_iterations=8,
    temperature=0.2,
    sampler="cached",  # Fast-dLLM's cache, renewed with each block
    kv_cache="prefix",
    num_views=2,
    scale=dict(learning_rate=1e-06, num_generations=16, **canvas(tokens=256, steps=128, block=32)),
    page=Page(
        paper="[2510.08233](https://arxiv.org/abs/2510.08233)",
        scores="2 random masks and complements; log p, weighted by softmaxes of reward and bounds",
        release="yuchen-zhu-zyc/DMPO@96af1a4",
        largest_difference="1e-07",
        differs="mean over prompts of groups' sums (release: times rows per device / 16); no dropout in rollouts",
    ),
)
