"""Where a step's hidden states come from: a forward pass over everything, or over a window that reads a KV cache.

The cache is Fast-dLLM's (arXiv 2505.22618, section 3.2). The first pass of each block feeds the whole canvas and keeps
every layer's keys and values; the block's later passes feed a window and take the rest from there, as it was then.
    prefix   the window is the block and all behind it; only what lies before the block is cached
    dual     the window is the block alone
Keys carry their rotary position, and attention looks both ways, so a window's keys may follow the cached ones in any
order, as long as the mask does too.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from transformers import DynamicCache

from d1.models.attention import count_positions, over_queries, takes_masks_over_queries
from d1.models.head import body_and_head
from d1.models.kinds import block_size, is_encoder, windowed


def check_cacheable(config: Any) -> None:
    """Raises ValueError for a kind of model that no cache is right for."""
    advice = "use the sampler exact or parallel"
    if is_encoder(config):
        raise ValueError(f"{config.model_type} is an encoder, which has no key-value cache in Transformers: {advice}")
    if block_size(config):
        raise ValueError(f"{config.model_type} with blocks of {block_size(config)} tokens has no cache yet: {advice}")
    if windowed(config):
        raise ValueError(
            f"{config.model_type} has layers that attend within a window, and a cache of those forgets keys: {advice}"
        )


class Passes:
    """Forward passes that fill one block after another.

    Args:
        cache: "prefix", "dual", or None for passes over everything.
        padded: whether some position is invisible. Without a mask, or with one over queries, no forward pass waits for
            the device (`takes_masks_over_queries`).
    """

    def __init__(self, model: Any, cache: str | None, padded: bool) -> None:
        if cache is not None:
            check_cacheable(model.config)
        self.body, _ = body_and_head(model)
        self.cache, self.padded = cache, padded
        self.per_query = padded and takes_masks_over_queries(model.config)
        # Where logits speak of the next token, a block's first state is the one before it.
        self.before = int(getattr(model.config, "predicts_next_token", False))
        self.window = slice(0, None)
        self.past: DynamicCache | None = None

    def enter(self, start: int, end: int) -> None:
        """The next pass is the first of the block that fills columns `start` to `end`."""
        self.past = None
        self.window = slice(max(0, start - self.before), end if self.cache == "dual" else None)

    def keep(self, rows: Tensor) -> None:
        """Goes on with these rows alone until the next block."""
        if self.past is not None:
            self.past.batch_select_indices(rows)

    def mask(self, visible: Tensor, queries: int) -> Tensor | None:
        """The attention mask of so many queries that see the keys `visible` (rows, keys)."""
        if not self.per_query:
            return visible if self.padded else None
        return over_queries(visible, queries)

    def states(self, ids: Tensor, visible: Tensor, positions: Tensor) -> tuple[Tensor, Tensor]:
        """Aligned last hidden states (rows, n, hidden) at `positions` (rows, n), which lie in the block, and (rows,)
        how many tokens each row fed to get them; padding does not count."""
        length = ids.shape[1]
        first, end, _ = self.window.indices(length)
        whole = self.cache is None or (first, end) == (0, length)  # all is window: nothing to cache
        if whole or self.past is None:
            options: dict[str, Any] = {"position_ids": count_positions(visible)} if self.per_query else {}
            if not whole:
                options["past_key_values"] = self.past = DynamicCache()
            return self.body(ids, self.mask(visible, length), positions, **options), visible.sum(-1)
        if self.past.get_seq_length() == length:
            drop_columns(self.past, first, end)
        fed = visible[:, first:end]
        states = self.body(
            ids[:, first:end],
            self.mask(torch.cat([visible[:, :first], visible[:, end:], fed], dim=1), end - first),
            positions - first,
            position_ids=count_positions(visible)[:, first:end],
            past_key_values=self.past,
        )
        self.past.crop(first - end)
        return states, fed.sum(-1)


def drop_columns(past: DynamicCache, first: int, end: int) -> None:
    """Takes the keys and values of the columns `first` to `end` out of every layer."""
    layers: Any = past.layers
    for layer in layers:
        layer.keys = torch.cat([layer.keys[:, :, :first], layer.keys[:, :, end:]], dim=2)
        layer.values = torch.cat([layer.values[:, :, :first], layer.values[:, :, end:]], dim=2)
