"""Trees of rollouts: the completions of a prompt share their first passes, and each node has several children.

With `branches` (b_0, ..., b_n), the root of a tree, at level 0, is the canvas of mask tokens. A node of level l has b_l
children, which continue it for an equal share of the run's passes with noise of their own. The leaves are the
completions of a prompt, b_0 x ... x b_n of them, in the order in which a walk through the tree meets them. So the
leaves below a node are neighbours, and each node is a state of the first of them.

That first leaf also is the row of the edge from the node's parent: it is sampled, scored and counted there, once.
`start_steps` is the pass at which a row's own edges begin, each of which is one view.

The value of a leaf is its reward, that of another node the mean of its children's. The advantage of an edge is the
value of its child minus the mean value of the other children of its parent.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from operator import itemgetter
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from d1.rl.batch import Batch, RankView, pad_to_width
from d1.rl.branches import first_level, leaves_below, level_steps
from d1.rl.bridge import REWARD
from d1.rl.sources import RolloutRequest, RolloutSource, SourceWrapper
from d1.sampling import Rollout, RolloutStart

# --- Values and advantages --------------------------------------------------------------------------------------------


def edge_advantages(rewards: Tensor, branches: Sequence[int]) -> Tensor:
    """(trees, leaves, levels), from the leaves' rewards (trees, leaves): the advantage of each leaf's edge to a node of
    each level, from level 1 on. Leaves that share an edge have its advantage. NaN rewards are left out of means."""
    advantages = []
    for level, children in enumerate(branches):
        below = leaves_below(branches, level + 1)
        values = node_values(rewards, branches, level + 1).unflatten(1, (-1, children))
        others = [[number for number in range(children) if number != child] for child in range(children)]
        mean_of_others = values[..., torch.tensor(others, device=rewards.device)].nanmean(-1)
        edges = (values - mean_of_others).nan_to_num(0.0)
        advantages.append(edges.flatten(1).repeat_interleave(below, dim=1))
    return torch.stack(advantages, dim=2)


def node_values(rewards: Tensor, branches: Sequence[int], level: int) -> Tensor:
    """(trees, nodes of the level) the values of nodes: means of their children's, over levels."""
    values = rewards
    for children in reversed(branches[level:]):
        values = values.unflatten(1, (-1, children)).nanmean(-1)
    return values


def siblings(values: Tensor, branches: Sequence[int], level: int) -> Tensor:
    """(trees, leaves, children, ...), from values (trees, leaves, ...): at each leaf, those of the rows of all edges
    from its node of this level."""
    children, below = branches[level], leaves_below(branches, level + 1)
    of_edges = values[:, ::below].unflatten(1, (-1, children))  # an edge's row is the first leaf below it
    return of_edges.repeat_interleave(children * below, dim=1)


def tree_fields(batch: Batch, branches: Sequence[int], ranks: RankView) -> Batch:
    """`view_advantages`, `sibling_advantages`, `sibling_ids` and `sibling_positions` (`d1/rl/batch.py`) of a batch
    whose view v scores the edges from the nodes of level v."""
    # Shapes: R rows, U updates, V views, T tokens of the canvas, S siblings.
    rows, leaves = len(batch["canvas_ids"]), leaves_below(branches, 0)
    mask_RT = pad_to_width(batch["completion_mask"], batch["canvas_ids"].shape[1]).bool()
    scored_RUVT = batch["view_weights"].ne(0) & mask_RT[:, None, None]
    counted_RVT = scored_RUVT.any(1)

    # The leaves' rewards, and the tokens of their edges, of all processes: (trees, leaves, ...).
    rewards = ranks.all_gather(batch[REWARD]).view(-1, leaves)
    ids_RVT = torch.where(counted_RVT, batch["canvas_ids"].unsqueeze(1), -1)
    ids = ranks.all_gather(ids_RVT).unflatten(0, (-1, leaves))
    advantages = edge_advantages(rewards, branches)

    # Those of the siblings of each edge. Siblings of a smaller family are padded with children that reveal nothing.
    max_children = max(branches)
    advantages_of_levels, ids_of_levels = [], []
    for level, children in enumerate(branches):
        sibling_advantages = siblings(advantages[:, :, level], branches, level)
        advantages_of_levels.append(F.pad(sibling_advantages, (0, max_children - children)))
        sibling_ids = siblings(ids[:, :, level], branches, level)
        ids_of_levels.append(F.pad(sibling_ids, (0, 0, 0, max_children - children), value=-1))

    # Of this process's rows.
    advantages_RV = ranks.local_slice(advantages.flatten(0, 1), rows)
    sibling_advantages_RVS = ranks.local_slice(torch.stack(advantages_of_levels, dim=2).flatten(0, 1), rows)
    sibling_ids_RVST = ranks.local_slice(torch.stack(ids_of_levels, dim=2).flatten(0, 1), rows)
    sibling_ids_RVST = torch.where(counted_RVT.any(-1)[..., None, None], sibling_ids_RVST, -1)

    # A position counts once per parent: each of its children with a token there and A > 0 has an equal share of it.
    positive_RVT = counted_RVT & (advantages_RV > 0).unsqueeze(-1)
    count_RVT = ((sibling_ids_RVST >= 0) & (sibling_advantages_RVS > 0).unsqueeze(-1)).sum(2)
    shares_RV = (positive_RVT / count_RVT.clamp(min=1)).double().sum(-1)
    local_positions_U = (shares_RV.unsqueeze(1) * scored_RUVT.any(-1)).sum((0, 2))
    positions_U = ranks.all_gather(local_positions_U.unsqueeze(0)).sum(0).round().long()
    return {
        "view_advantages": advantages_RV,
        "sibling_advantages": sibling_advantages_RVS,
        "sibling_ids": sibling_ids_RVST,
        "sibling_positions": positions_U.expand(rows, -1),
    }


# --- The source -------------------------------------------------------------------------------------------------------


class TreeRollouts(SourceWrapper):
    """The source of a training rollout whose prompts have trees; it asks `source` to continue rollouts. Evaluations
    sample independent completions."""

    def __init__(self, source: RolloutSource, branches: Sequence[int]) -> None:
        super().__init__(source)
        self.name, self.can_continue = "a tree of rollouts", False
        self.branches = [*branches]

    def sample(self, request: RolloutRequest) -> Rollout:
        if self.trainer.mode == "eval":
            return self.source.sample(request)
        # The level at which each row's own edges begin, and the passes at which levels begin.
        trainer, rows, gen_length = self.trainer, len(request.prompt_ids), self.trainer.sampling.gen_length
        first, leaves = trainer.first_row(rows), leaves_below(self.branches, 0)
        row_levels = [first_level(self.branches, (first + row) % leaves) for row in range(rows)]
        steps = level_steps(self.branches, trainer.sampling.steps)

        sampled = blank_rollout(request, gen_length)
        for level in range(len(self.branches)):
            chosen = [row for row in range(rows) if row_levels[row] == level]
            start = None
            if level > 0:
                # A node may be a state of another process's row, so all processes gather, also those without a row.
                # Their canvases, because prompts are padded to other widths there.
                canvases = replace(sampled, ids=sampled.ids[:, -gen_length:].contiguous())
                all_canvases = change_tensors(canvases, trainer.accelerator.gather)
                below = leaves_below(self.branches, level)
                nodes = torch.tensor([(first + row) // below * below for row in chosen], dtype=torch.long)
                parents = change_tensors(all_canvases, itemgetter(nodes))
                start = RolloutStart.from_rollout(parents, steps[level], trainer.mask_token_id)
            if not chosen:
                continue

            # Continue the rows that begin at this level.
            continued = self.source.sample(
                RolloutRequest(
                    prompt_ids=request.prompt_ids[chosen],
                    prompt_mask=request.prompt_mask[chosen],
                    keys=[request.keys[row] for row in chosen],
                    stops=request.stops,
                    start=start,
                )
            )
            continued = replace(continued, start_steps=torch.full_like(continued.passes, steps[level]))
            for name, values in vars(sampled).items():
                if values is not None:
                    values[chosen] = getattr(continued, name)
        return sampled

    def before_views(self, batch: Batch, ranks: RankView) -> None:
        """Adds `is_end`: edges of a tree end at an EOS."""
        super().before_views(batch, ranks)
        # Ids are compared one by one: a list of them would be an upload that waits.
        is_end = torch.zeros_like(batch["canvas_ids"], dtype=torch.bool)
        for end_id in self.trainer.eos_token_ids:
            is_end = is_end | (batch["canvas_ids"] == end_id)
        batch["is_end"] = is_end

    def after_scoring(self, batch: Batch, ranks: RankView) -> None:
        """Adds `view_advantages` and the siblings of each edge (`d1/rl/batch.py`)."""
        super().after_scoring(batch, ranks)
        del batch["is_end"]  # only the views depend on it
        if self.trainer.mode == "train":
            batch.update(tree_fields(batch, self.branches, ranks))


def blank_rollout(request: RolloutRequest, gen_length: int) -> Rollout:
    """A rollout of these prompts of which nothing is sampled yet."""
    rows = len(request.prompt_ids)
    numbers = torch.zeros(rows, dtype=torch.long, device=request.prompt_ids.device)
    ids = torch.cat([request.prompt_ids, numbers.unsqueeze(1).expand(-1, gen_length)], dim=1)
    values = torch.zeros(rows, gen_length, device=ids.device)
    return Rollout(
        ids=ids,
        logps=values,
        reveal_steps=torch.full_like(ids[:, -gen_length:], -1),
        entropies=values.clone(),
        passes=numbers,
        forward_tokens=numbers.clone(),
        start_steps=numbers.clone(),
    )


def change_tensors(sampled: Rollout, change: Callable[[Tensor], Tensor]) -> Rollout:
    """A rollout without edits with each of its tensors changed."""
    changed: dict[str, Any] = {name: change(values) for name, values in vars(sampled).items() if values is not None}
    return Rollout(**changed)
