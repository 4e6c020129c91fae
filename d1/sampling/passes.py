"""Forward passes that give a step its hidden states, with or without cached keys and values."""

from __future__ import annotations

from collections.abc import Callable
from copy import copy
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import pad
from transformers import DynamicCache

from d1.models.attention import count_positions, over_queries, takes_masks_over_queries
from d1.models.head import body_and_head


class Place(NamedTuple):
    """The columns of the canvas where a row fills its block: from `start` up to but not including `end`."""

    start: int
    end: int
    origin: int  # the first column that is processed; those before it are padding
    boundary: int  # a column where a block of a block-causal model begins


class Passes:
    """Passes that process the whole text, and the base class of the caches. Tensors hold the rows of all branches.

    Args:
        branches: 2 with guidance, otherwise 1.
        mask_token_id: the token at hidden places.
        masked: whether a pass needs an attention mask, because some position is invisible or, in a cache, may be.
        aligned: whether all rows fill the same columns.
    """

    def __init__(
        self, model: Any, *, branches: int, mask_token_id: int, device: Any, masked: bool, aligned: bool
    ) -> None:
        self.body, _ = body_and_head(model)
        self.branches, self.mask_token_id, self.device = branches, mask_token_id, device
        self.masked, self.aligned = masked, aligned
        self.over_queries = takes_masks_over_queries(model.config)
        # Where logits predict the next token, the state for a place is that of the token before it.
        self.shift = int(getattr(model.config, "predicts_next_token", False))

    def enter(self, places: list[Place], kept: list[int]) -> None:
        """Begin new blocks: the next pass is the first of these blocks, one place per row. The first rows continue from
        the last block, where their numbers were `kept`; the rows after them are new."""

    def keep(self, rows: Tensor) -> None:
        """Continue, until the next block, with only these rows of the last pass."""

    def states(self, ids: Tensor, visible: Tensor, positions: Tensor) -> tuple[Tensor, Tensor]:
        """Aligned last hidden states (rows, n, hidden) at `positions` (rows, n), which lie in the rows' blocks, and
        (rows,) how many real tokens of each row were processed; `ids` and `visible` are (rows, length)."""
        return self.feed_all(ids, visible, positions), visible.sum(-1)

    def feed_all(self, ids: Tensor, visible: Tensor, positions: Tensor, past: DynamicCache | None = None) -> Tensor:
        """The states at `positions` from a pass over the whole text, whose keys and values go to `past`."""
        options: dict[str, Any] = {} if past is None else {"past_key_values": past}
        if self.masked and self.over_queries:
            options["position_ids"] = count_positions(visible)
        return self.body(ids, self.mask(visible, ids.shape[1]), positions, **options)

    def feed_apart(
        self, old: int, count: int, feed: Callable[[range, Any], tuple[DynamicCache, Tensor, Tensor, Tensor]]
    ) -> tuple[DynamicCache, Tensor, Tensor, Tensor]:
        """Run one pass for the first `old` of `count` rows, which have a cache, and one for the others, which do not.

        `feed` gets the numbers of the rows within a branch, and the index of these rows in all branches. It returns
        their cache, a tensor (rows, columns) about its columns, and the two results of `states`; `feed_apart` returns
        the same for all rows.
        """
        groups = [group for group in (range(old), range(old, count)) if group]
        if len(groups) == 1:
            return feed(groups[0], slice(None))
        rows = [self.in_branches([*group], count) for group in groups]
        pasts, columns, states, fed = zip(*map(feed, groups, rows), strict=True)
        order, width = torch.cat(rows).argsort(), max(of.shape[1] for of in columns)
        wide = torch.cat([pad(of, (width - of.shape[1], 0)) for of in columns])
        return join_rows([*pasts], order), wide[order], torch.cat(states)[order], torch.cat(fed)[order]

    def mask(self, visible: Tensor, queries: int) -> Tensor | None:
        """The attention mask for `queries` queries that see the keys `visible` (rows, keys)."""
        if not self.masked:
            return None
        return over_queries(visible, queries) if self.over_queries else visible

    def of_rows(self, numbers: list[int]) -> Tensor:
        """(rows,) on the device, from one number per row of a branch. The copy does not wait for the device."""
        return torch.tensor(numbers, dtype=torch.long).repeat(self.branches).to(self.device, non_blocking=True)

    def in_branches(self, rows: list[int], count: int) -> Tensor:
        """The numbers of these rows in all branches; a branch has `count` rows."""
        numbers = [row + branch * count for branch in range(self.branches) for row in rows]
        return torch.tensor(numbers, dtype=torch.long).to(self.device, non_blocking=True)


def layers_of(past: DynamicCache) -> list[Any]:
    layers: Any = past.layers
    return list(layers)


def same_layers(past: DynamicCache) -> DynamicCache:
    """A cache with the keys and values of `past`; changes to it do not change `past`."""
    other = copy(past)
    other.layers = [copy(layer) for layer in past.layers]
    return other


def select_rows(past: DynamicCache, rows: Tensor) -> DynamicCache:
    """A cache of these rows of `past`, which is not changed."""
    if not past.get_seq_length():
        return DynamicCache()
    selected = same_layers(past)
    selected.batch_select_indices(rows)
    return selected


def join_rows(parts: list[DynamicCache], order: Tensor) -> DynamicCache:
    """One cache with the rows of all parts, padded on the left, in the order `order`."""
    whole, width = same_layers(parts[0]), max(past.get_seq_length() for past in parts)
    for layer, *others in zip(layers_of(whole), *map(layers_of, parts), strict=True):
        for name in ("keys", "values"):
            tensors = [getattr(other, name) for other in others]
            padded = [pad(of, (0, 0, width - of.shape[2], 0)) if of.shape[2] < width else of for of in tensors]
            setattr(layer, name, torch.cat(padded)[order])
    return whole
