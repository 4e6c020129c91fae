"""d-TreeRPO (arXiv 2512.09675): the completions of a prompt are the leaves of a tree, and each edge has an advantage.

    loss = -min(rho A, clip(rho) A) + beta k3 of the tokens that an edge reveals, in the state of its parent; the mean
        over an edge's tokens, then over edges; A = V(child) - mean V of its siblings
    + lambda KL(q || p of the parent), q = softmax(A / tau) over the siblings with A > 0 that reveal a token at a
        position, summed by token; the mean over these positions

Release: THU-BPM/d-TreeRPO@3eb6f21 dtreerpo: slurm_scripts/dtreerpo.yaml, run_llada_gsm8k_dtreerpo.sh,
dtreerpo_trainer.py. Differs: positions of the distillation count over the whole rollout, not per micro-batch; each
prompt has one tree, where TRL's unused num_generations of 2 gave it two. Not copied: dropout in the old and the
reference log-probabilities; tokens with p = 1 count; q and log q have no 1e-8; names of settings that are read by
nobody.

The release trains on the edges of one parent for 12 updates, then on those of the next: 60 updates per rollout. Here
the parents are dealt, in random order, to all `num_iterations` updates.
"""

from __future__ import annotations

import math
from itertools import pairwise
from typing import TYPE_CHECKING, Any

from d1.rl.losses import CLIP, Objective, clipped_views
from d1.rl.methods.entry import Page, Trained
from d1.rl.methods.shared import canvas, method
from d1.scoring import Estimator
from d1.scoring.entry import always, reveal_steps

if TYPE_CHECKING:
    from collections.abc import Sequence

    from torch import Tensor

    from d1.rl.losses import Loss, LossInputs
    from d1.scoring import Randomness, SampledRows, Views, ViewSettings

# --- The estimator: each edge in the state of its parent --------------------------------------------------------------
#
# View v is the edge from a node of level v. It hides what the node hides, and scores what the child reveals, up to the
# child's first EOS. An edge that several leaves share is a view of the first of them alone.


def parents_of_update(order: Sequence[int], update: int, updates: int) -> list[int]:
    """The parents whose edges an update scores: all of them are dealt to the updates, one after the other in this
    order, each for an equal number of updates as far as possible."""
    if updates >= len(order):
        return [order[update * len(order) // updates]]
    return [parent for number, parent in enumerate(order) if number * updates // len(order) == update]


def numbered_parents(branches: Sequence[int]) -> list[range]:
    """The numbers of the parents of each level, in the order of their first leaves."""
    numbers, first = [], 0
    for level in range(len(branches)):
        count = math.prod(branches[:level])
        numbers.append(range(first, first + count))
        first += count
    return numbers


def draw_edges(sampled: SampledRows, random: Randomness, settings: ViewSettings) -> Views:
    """The views of the edges whose parents the update scores. A token's weight is that of the mean over its edge's
    tokens, over the tree's edges in this update and over trees."""
    import torch

    from d1.rl.branches import leaves_below, level_steps
    from d1.scoring import Views
    from d1.scoring.replay import clean_prompt

    branches = settings.branches or [1]  # without a tree, a completion is one edge from the canvas of mask tokens
    steps, leaves = level_steps(branches, settings.steps), leaves_below(branches, 0)
    numbers = numbered_parents(branches)
    parents = range(sum(map(len, numbers)))
    reveal_steps, rows = sampled.reveal_steps, len(sampled.reveal_steps)
    if sampled.start_steps is None:  # independent completions, of an evaluation: no edge is shared
        starts = torch.zeros_like(reveal_steps[:, 0])
        chosen, edges = [*parents], leaves * len(branches)
    else:
        starts, chosen = sampled.start_steps, [*parents]
        if random.of_rollout is not None:
            order = torch.randperm(len(parents), generator=random.of_rollout).tolist()
            chosen = parents_of_update(order, random.update, random.updates)
        edges = 0
        for children, level_parents in zip(branches, numbers, strict=True):
            edges += children * len({*chosen} & {*level_parents})
    is_end = torch.zeros_like(sampled.scored) if sampled.is_end is None else sampled.is_end
    leaf = (torch.arange(rows, device=reveal_steps.device) + random.first_row) % leaves
    hidden, weights = [], []
    for level, (step, next_step) in enumerate(pairwise(steps)):
        is_last = level == len(branches) - 1
        there = (reveal_steps >= 0) & (reveal_steps < step)
        at_child = (reveal_steps >= 0) if is_last else (reveal_steps >= 0) & (reveal_steps < next_step)
        ends = at_child & is_end
        before_end = ends.cumsum(1) - ends.long() == 0  # and the end itself
        parent = numbers[level][0] + leaf // leaves_below(branches, level)
        taking_part = (starts <= step) & torch.isin(parent, torch.tensor(chosen, device=parent.device))
        tokens = at_child & ~there & before_end & sampled.scored & taking_part.unsqueeze(1)
        hidden.append(torch.cat([clean_prompt(sampled)[:, 0], ~there], dim=1))
        weights.append(tokens * (leaves / edges) / tokens.sum(1, keepdim=True).clamp(min=1))
    return Views(torch.stack(hidden, dim=1), torch.stack(weights, dim=1).float())


# --- The objective ----------------------------------------------------------------------------------------------------


def schedules(progress: float, weight: float) -> tuple[float, float]:
    """The weight and the temperature of the distillation, at a share of the run: lambda rises exponentially from 0 to
    `weight`, tau falls from 2 to 0."""
    lam = weight * math.expm1(2.0 * progress) / math.expm1(2.0)
    tau = max(1e-6, 2.0 * (1 - progress) ** 0.7)
    return lam, tau


def distillation(inputs: LossInputs, temperature: float) -> Tensor:
    """KL(q || p), the mean over positions; its gradient is that of -q log p.

    The tokens of q are those that siblings revealed, and each of these is scored in its own row, in the state of the
    same parent. So a row has q of its own token, and an equal share of the position's sum of q log q.
    """
    import torch

    ids_RVST, advantages_RVS, own_RV = inputs.sibling_ids, inputs.sibling_advantages, inputs.view_advantages
    assert ids_RVST is not None
    assert advantages_RVS is not None
    assert own_RV is not None
    is_there_RVST = (ids_RVST >= 0) & (advantages_RVS > 0).unsqueeze(-1)
    # Differences to the best sibling, before the division: advantages over a small temperature would lose digits.
    best_RV1T = torch.where(is_there_RVST, advantages_RVS.unsqueeze(-1), 0.0).amax(2, keepdim=True)
    exponents_RVST = (advantages_RVS.unsqueeze(-1) - best_RV1T) / temperature
    powers_RVST = exponents_RVST.where(is_there_RVST, -torch.inf).exp()
    sums_RV1T = powers_RVST.sum(2, keepdim=True)
    q_RVST = powers_RVST / sums_RV1T.where(sums_RV1T > 0, 1.0)
    same_token = ids_RVST.unsqueeze(2) == ids_RVST.unsqueeze(3)
    by_token_RVST = (same_token * q_RVST.unsqueeze(2)).sum(3)  # the q of each sibling's token
    q_log_q_RVT = torch.xlogy(q_RVST, by_token_RVST.where(is_there_RVST, 1.0)).sum(2)
    # The row's own share
    taking_part_RVT = inputs.scored & (own_RV > 0).unsqueeze(-1)
    own_power_RVT = ((own_RV.unsqueeze(-1) - best_RV1T.squeeze(2)) / temperature).exp()
    own_q_RVT = (own_power_RVT / sums_RV1T.squeeze(2)).where(taking_part_RVT, 0.0)
    shares_RVT = q_log_q_RVT / is_there_RVST.sum(2).clamp(min=1) - own_q_RVT * inputs.view_logps
    positions = inputs.sibling_positions
    if positions is None:
        positions = (taking_part_RVT / is_there_RVST.sum(2).clamp(min=1)).sum().clamp(min=1)
    return shares_RVT.where(taking_part_RVT, 0.0).sum() / positions


def clipped_edges(inputs: LossInputs, settings: Any) -> Loss:
    """The loss of `clipped_views` with the edges' advantages, and the distillation of the better siblings."""
    loss, metrics = clipped_views(inputs, settings)
    if inputs.sibling_ids is None:  # an evaluation has no trees
        return loss, metrics
    lam, tau = schedules(inputs.progress, settings.sibling_weight)
    distilled = distillation(inputs, tau)
    return loss + lam * distilled, metrics | {"distillation": distilled.item()}


ESTIMATORS = {
    "edges": Estimator(
        draw_edges,
        lambda settings: len(settings.branches or [1]),
        draws=lambda settings: settings.branches is not None,  # which parents an update scores
        replays=True,
        clean_prompt=True,
        partial=always,
        reads=reveal_steps,
        settings=("branches",),
    ),
}
OBJECTIVES = {
    "clipped_edges": Objective(
        clipped_edges,
        per_view=True,
        view_advantages=True,
        loss_types=("sum",),
        settings=("loss_type", *CLIP, "sampling_weight_cap", "sibling_weight"),
        idle=CLIP,
    ),
}


METHOD = method(
    "d-TreeRPO, arXiv 2512.09675",
    trained=Trained(32, lora_r=128, in_4bit=True),  # trees: 4 rows x 8 GPUs
    estimator="edges",
    branches=[4, 4],  # num_tree_samples, tree_branch_factor; tree_contraction_factor 2
    p_mask_prompt=0.0,
    scored_tokens="drawn",  # up to the child's first EOS, as the estimator weighs them
    objective="clipped_edges",  # -min(rho A, clip(rho) A), rho of each token
    loss_type="sum",  # the weights are those of the mean over an edge's tokens, then over edges
    epsilon=0.4,
    beta=0.01,  # k3 to the reference, per token
    num_iterations=60,  # 12 for each of the 5 parents
    sibling_weight=0.003,  # self_distillation_lambda_max
    temperature=0.9,
    scale=dict(learning_rate=3e-05, num_generations=16, **canvas(tokens=256, steps=128, block=32)),
    page=Page(
        paper="[2512.09675](https://arxiv.org/abs/2512.09675)",
        scores="edges of a tree, in their parent's state; token ratio; k3; distillation of siblings",
        release="THU-BPM/d-TreeRPO@3eb6f21",
        largest_difference="5e-08",
        differs="positions of the distillation counted over the rollout; one tree per prompt",
    ),
)
