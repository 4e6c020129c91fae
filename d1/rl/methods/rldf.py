"""RLDF (arXiv 2605.25638), of ant-research/Drift: the policy gradient in a few states, on the likely tokens.

    loss = -A l + beta k3 of the tokens that a state revealed, and of hidden ones with p >= .6; the mean per state,
        then over states

Release: ant-research/Drift@7abd99b: configs/llada_math.yaml, trainer/main_rl.py, masking_strategy.py,
rollout_utils.py. Differs: 4 of 8 prompts are kept, as on one process of the release; on two or more, it keeps all 8. A
completion of a single step counts. The cache keeps the whole rest of the canvas, the release 128 tokens of it
(further_horizon).
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

from d1.rl.losses import Advantage, Objective, Penalty, k3_of, require_logps
from d1.rl.methods.entry import Page, Trained
from d1.rl.methods.shared import CONSTANT, THRESHOLD, method
from d1.scoring import Estimator
from d1.scoring.entry import always, one_per_draw

if TYPE_CHECKING:
    from torch import Tensor

    from d1.rl.losses import Loss, LossInputs
    from d1.scoring import Randomness, SampledRows, Views, ViewSettings


def draw_states(sampled: SampledRows, random: Randomness, settings: ViewSettings) -> Views:
    """Draw steps with probabilities proportional to the exponential of the mean surprisal of what they revealed:
    without replacement, then, if a row has fewer steps, more of them with replacement.

    Tokens that do not count are hidden only in the row's first step: its later states show them, also those that the
    sampler had not revealed yet (as released).
    """
    import torch
    import torch.nn.functional as F

    from d1.scoring import Views
    from d1.scoring.inputs import steps_in_blocks
    from d1.scoring.replay import clean_prompt, draw_with_replacement, segment_sums, top_segments

    scored, steps = sampled.scored, steps_in_blocks(sampled.reveal_steps, sampled.blocks)
    sums, counts = segment_sums(steps, scored, -sampled.logps)
    surprisals = (sums / counts.clamp(min=1)).masked_fill(counts == 0, -torch.inf)
    surprisals[:, 0].masked_fill_(~scored.any(1), 0.0)  # a row that takes no part has a step, too
    # The largest log-probabilities plus Gumbel noise: a draw without replacement.
    uniform = random.uniform(settings.steps)[:, : sums.shape[1]].double().clamp(min=1e-12).to(sums.device)
    noisy = surprisals - (-uniform.log()).log()
    # A fixed number of views: a mean over them must not depend on the other rows of the batch.
    noisy = F.pad(noisy, (0, max(0, settings.draws - noisy.shape[1])), value=-torch.inf)
    chosen, is_new = top_segments(noisy, settings.draws)
    again = draw_with_replacement(surprisals.softmax(-1), random.uniform(settings.draws).to(sums.device))
    chosen = torch.where(is_new > 0, chosen, again).unsqueeze(-1)
    first = (counts > 0).long().argmax(-1)[:, None, None]
    hidden = torch.where(scored.unsqueeze(1), steps.unsqueeze(1) >= chosen, chosen == first)
    hidden_text = torch.cat([clean_prompt(sampled).expand(-1, chosen.shape[1], -1), hidden], dim=-1)
    return Views(hidden_text, (hidden & scored.unsqueeze(1)).float())


def likely(inputs: LossInputs) -> Tensor:
    """(rows, views, tokens) bool: the scored tokens that the view's step revealed, and those to which the current
    policy gives a probability of at least 0.6 (RLDF)."""
    import torch

    if inputs.reveal_steps is None:
        raise ValueError("reveal_steps is missing: a view reveals the tokens of its first step")
    scored_RVT = inputs.scored
    steps_RVT = inputs.reveal_steps.unsqueeze(1).expand_as(scored_RVT)
    first = steps_RVT.masked_fill(~scored_RVT, torch.iinfo(steps_RVT.dtype).max).amin(-1, keepdim=True)
    return scored_RVT & ((steps_RVT == first) | (inputs.view_logps.detach() >= math.log(0.6)))


def mean_of_states(values_RVT: Tensor, counts_RVT: Tensor) -> Tensor:
    """The mean of values where `counts_RVT` is true: first per view, over the tokens of all rows of the micro-batch,
    then over the views."""
    return ((values_RVT * counts_RVT).sum((0, 2)) / counts_RVT.sum((0, 2)).clamp(min=1)).mean()


def rldf(inputs: LossInputs, settings: Any) -> Loss:
    """-A log p of the `likely` tokens in a few states of the rollout; the mean per state, then over states (RLDF)."""
    counts_RVT = likely(inputs)
    loss = mean_of_states(-inputs.advantages[:, None, None] * inputs.view_logps, counts_RVT)
    return loss, {"likely": (counts_RVT.sum() / inputs.scored.sum().clamp(min=1)).item()}


def k3_likely(inputs: LossInputs, settings: Any) -> Tensor:
    """k3 of each `likely` token, averaged like the objective `rldf` (RLDF)."""
    return mean_of_states(k3_of(require_logps(inputs.view_reference) - inputs.view_logps), likely(inputs))


def floored(advantages: Tensor) -> Tensor:
    """Advantages divided by the group's standard deviation, or by 0.01 if that is larger (RLDF)."""
    return advantages / advantages.std(1, keepdim=True).clamp(min=0.01)


ESTIMATORS = {
    "states": Estimator(
        draw_states,
        one_per_draw,
        replays=True,
        clean_prompt=True,
        partial=always,
        reads=lambda settings: ("reveal_steps", "logps"),
        settings=("num_views",),
    ),
}
OBJECTIVES = {
    "rldf": Objective(
        rldf, reads_old=False, per_view=True, by_view=True, weighs_views=False, reads_steps=True, settings=()
    ),
}
PENALTIES = {
    "k3_likely": Penalty(k3_likely, settings=(), by_view=True, weighs_views=False, reads_steps=True),
}
ADVANTAGES = {"floored": Advantage(floored, settings=())}


METHOD = method(
    "RLDF, arXiv 2605.25638, of ant-research/Drift",
    trained=Trained(8),  # rollout.batch_size
    **THRESHOLD | dict(sampler="cached+parallel"),  # use_cache, remasking_strategy low_confidence_dynamic
    estimator="states",  # sequential_masking, sample_temperature 1: p ~ exp(mean surprisal), without replacement
    p_mask_prompt=0.0,
    scored_tokens="unpadded",  # completion_mask
    objective="rldf",  # -A l of tokens revealed there, and of hidden ones with p >= low_prob_threshold .6
    loss_type="sum",
    epsilon=0.2,  # not read: there is no ratio
    kl="k3_likely",  # kl_type k3
    beta=0.01,
    advantage="floored",  # (r - m) / max(s, .01)
    prompt_share=0.5,  # batch_size_lm 4 of rollout.batch_size 8
    num_iterations=1,
    temperature=1.0,
    max_grad_norm=1.0,  # accelerate_configs/dp_zero3.json
    num_views=4,  # mask_num
    kv_cache="prefix",
    reveal_level=0.9,  # dynamic_threshold
    scale=dict(learning_rate=1e-06, num_generations=4, max_completion_length=256, block_length=32, **CONSTANT),
    page=Page(
        paper="[2605.25638](https://arxiv.org/abs/2605.25638)",
        scores="4 drawn states; log p; k3",
        release="ant-research/Drift@7abd99b",
        largest_difference="2e-07",
        differs=(
            "half of the prompts kept, as in the release on one process (on more, it keeps all); cache without horizon"
        ),
    ),
)
