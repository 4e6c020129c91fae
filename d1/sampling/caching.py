"""Where a step's hidden states come from: a forward pass over everything, or over a window that reads a KV cache.

Where attention is full, the cache is Fast-dLLM's (arXiv 2505.22618, section 3.2), an approximation. The first pass of
each block feeds the whole canvas and keeps every layer's keys and values; the block's later passes feed a window and
take the rest from there, as it was then.
    prefix   the window is the block and all behind it; only what lies before the block is cached
    dual     the window is the block alone
`delayed.py` has caches that feed what has changed, and no window.

Keys carry their rotary position, and attention looks both ways, so a window's keys may follow the cached ones in any
order, as long as the mask does too.

Where it is block-causal, the cache is exact: nothing before a block sees it (BD3-LM, arXiv 2503.09573, section 3.1).
"""

from __future__ import annotations

from collections.abc import Callable
from copy import copy
from typing import Any, Protocol

import torch
from torch import Tensor
from torch.nn.functional import pad
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
        raise ValueError(
            f"{config.model_type} with blocks of {block_size(config)} tokens needs no cached sampler: the others keep "
            f"the keys and values of its finished blocks already, and lose nothing by it: {advice}"
        )
    if windowed(config):
        raise ValueError(
            f"{config.model_type} has layers that attend within a window, and a cache of those forgets keys: {advice}"
        )


class Source(Protocol):
    """Where the states of one block after another come from."""

    def enter(self, live: list[int], start: int, end: int) -> None:
        """The next pass is the first of the block that fills columns `start` to `end` in the rows `live`."""

    def keep(self, rows: Tensor) -> None:
        """Goes on with these of the last pass's rows alone, until the next block."""

    def states(self, ids: Tensor, visible: Tensor, positions: Tensor) -> tuple[Tensor, Tensor]:
        """Aligned last hidden states (rows, n, hidden) at `positions` (rows, n), which lie in the block, and (rows,)
        how many tokens each row fed to get them; padding does not count."""


def mask_over(visible: Tensor, queries: int, per_query: bool) -> Tensor:
    """The mask of so many queries that see the keys `visible` (rows, keys): over queries, or over keys as it is."""
    return over_queries(visible, queries) if per_query else visible


def first_pass(
    body: Callable[..., Tensor], ids: Tensor, visible: Tensor, positions: Tensor, per_query: bool
) -> tuple[Tensor, DynamicCache]:
    """The states at `positions` from a pass over everything, and the keys and values of all columns."""
    past = DynamicCache()
    options = {"position_ids": count_positions(visible)} if per_query else {}
    mask = mask_over(visible, ids.shape[1], per_query)
    return body(ids, mask, positions, past_key_values=past, **options), past


class Passes:
    """A `Source` of any model: passes over everything, or with an approximate cache.

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

    def enter(self, live: list[int], start: int, end: int) -> None:
        self.past = None
        self.window = slice(max(0, start - self.before), end if self.cache == "dual" else None)

    def keep(self, rows: Tensor) -> None:
        if self.past is not None:
            self.past.batch_select_indices(rows)

    def mask(self, visible: Tensor, queries: int) -> Tensor | None:
        """The attention mask of so many queries that see the keys `visible` (rows, keys)."""
        return mask_over(visible, queries, self.per_query) if self.padded else None

    def states(self, ids: Tensor, visible: Tensor, positions: Tensor) -> tuple[Tensor, Tensor]:
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
    for layer in layers_of(past):
        layer.keys = torch.cat([layer.keys[:, :, :first], layer.keys[:, :, end:]], dim=2)
        layer.values = torch.cat([layer.values[:, :, :first], layer.values[:, :, end:]], dim=2)


class BlockPasses:
    """A `Source` of a block-causal model, with the exact cache of its finished blocks.

    A pass feeds the model's blocks that it fills, and the first of these passes also all that is not stored yet: the
    prompt, or the block before, which is complete only now. So a block of the model's size costs at most (steps + 1)
    times its tokens, and no pass is made to store it. Nobody reads the last block, which is not stored.

    Args:
        boundary: a column where a block of the model begins in every row.
    """

    opened: Tensor  # (branches x rows, 1, hidden), what predicted the block's first hidden token in its opening pass
    working: Tensor  # the part of it whose rows still work on the block

    def __init__(self, model: Any, boundary: int) -> None:
        self.body, _ = body_and_head(model)
        self.size, self.boundary = model.config.block_size, boundary
        self.shift = bool(getattr(model.config, "predicts_next_token", False))
        self.rows: list[int] = []  # of the batch, those whose first `stored` columns are in `finished`
        self.stored = 0
        self.finished: DynamicCache | None = None

    def enter(self, live: list[int], start: int, end: int) -> None:
        self.begin = start - (start - self.boundary) % self.size
        self.end = end + (self.boundary - end) % self.size
        self.opening = True
        if self.finished is not None and live != self.rows:
            self.finished = select_rows(self.finished, places_of(live, self.rows, self.opened))
        self.rows, self.past = live, self.finished

    def keep(self, rows: Tensor) -> None:
        self.working = self.working[rows]
        if self.past is not None:
            self.past = select_rows(self.past, rows)  # the next block goes on with `finished`

    def states(self, ids: Tensor, visible: Tensor, positions: Tensor) -> tuple[Tensor, Tensor]:
        first, end = self.stored if self.opening else self.begin, min(self.end, ids.shape[1])
        if self.begin and self.past is None:
            self.past = DynamicCache()
        fed = visible[:, first:end]
        states = self.body(
            ids[:, first:end],
            visible[:, :end],
            positions - first,
            position_ids=count_positions(visible)[:, first:end],
            past_key_values=self.past,
        )
        if self.past is not None:
            self.past.crop(self.begin - end)
        if self.opening:
            self.finished, self.stored, self.opening = self.past, self.begin, False
            self.opened = self.working = states[:, :1]
        elif self.shift:
            # A block's first token is predicted by the one before it, which only the opening pass fed.
            known = (positions == self.begin) & visible[:, : self.begin].any(1, keepdim=True)
            states = torch.where(known.unsqueeze(-1), self.working, states)
        return states, fed.sum(-1)


def places_of(live: list[int], rows: list[int], held: Tensor) -> Tensor:
    """Where `live`, some of the batch's rows, stand in `held` (branches x rows, ...), in every branch."""
    places = [rows.index(row) + first for first in range(0, len(held), len(rows)) for row in live]
    return torch.tensor(places).to(held.device, non_blocking=True)


def select_rows(past: DynamicCache, rows: Tensor) -> DynamicCache:
    """A cache of these rows of `past`, which stays as it is."""
    selected = copy(past)
    selected.layers = [copy(layer) for layer in past.layers]
    selected.batch_select_indices(rows)
    return selected


def joined(parts: list[DynamicCache], order: Tensor) -> DynamicCache:
    """One cache of the rows of all parts, padded on the left, in the order `order`."""
    whole, width = select_rows(parts[0], order[:0]), max(past.get_seq_length() for past in parts)
    for layer, *others in zip(layers_of(whole), *map(layers_of, parts), strict=True):
        for name in ("keys", "values"):
            tensors = [getattr(other, name) for other in others]
            padded = [pad(of, (0, 0, width - of.shape[2], 0)) if of.shape[2] < width else of for of in tensors]
            setattr(layer, name, torch.cat(padded)[order])
    return whole


def layers_of(past: DynamicCache) -> list[Any]:
    layers: Any = past.layers
    return list(layers)
