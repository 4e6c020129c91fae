"""Caches whose passes feed the tokens that have changed, and no window around them.

delayed  the first pass of each block feeds all; a later one feeds the tokens that the pass before still hid. What
         that pass revealed is fed once more, now that it is known, and then cached too (dKV-Cache, arXiv
         2505.15781, section 3.2)
lasting  delayed, and kept from block to block: only a row's very first pass feeds all, and the first pass of a
         later block feeds that block and what the pass before it revealed. Nothing else is ever renewed
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from transformers import DynamicCache

from d1.models.attention import count_positions, takes_masks_over_queries
from d1.models.head import body_and_head
from d1.sampling.caching import (
    Passes,
    Source,
    check_cacheable,
    first_pass,
    joined,
    layers_of,
    mask_over,
    places_of,
    select_rows,
)


class DelayedPasses:
    """A `Source` with the cache "delayed": after a block's first pass, which feeds all, each row feeds its own places.

    Args:
        mask_token_id: what stands at places that are hidden.
    """

    columns: Tensor  # (branches x rows, n), the last pass's `positions`
    hidden: Tensor  # bool, which of them it still hid

    def __init__(self, model: Any, mask_token_id: int) -> None:
        check_cacheable(model.config)
        self.body, _ = body_and_head(model)
        self.mask_token_id = mask_token_id
        self.per_query = takes_masks_over_queries(model.config)
        self.shift = bool(getattr(model.config, "predicts_next_token", False))
        self.past: DynamicCache | None = None

    def enter(self, live: list[int], start: int, end: int) -> None:
        self.past = None

    def keep(self, rows: Tensor) -> None:
        assert self.past is not None
        self.past.batch_select_indices(rows)
        self.columns, self.hidden = self.columns[rows], self.hidden[rows]

    def hides(self, ids: Tensor, positions: Tensor) -> Tensor:
        """Which of the `positions` hide a token of the row's block: a row that hides fewer than another has more."""
        return ids.gather(1, positions) == self.mask_token_id

    def states(self, ids: Tensor, visible: Tensor, positions: Tensor) -> tuple[Tensor, Tensor]:
        hidden = self.hides(ids, positions)
        if self.past is None:
            states, self.past = first_pass(self.body, ids, visible, positions, self.per_query)
            fed = visible.sum(-1)
        else:
            states = self.feed(self.past, ids, visible, positions)
            # Where logits speak of the next token, the tokens before the hidden ones are asked, too.
            fed = self.hidden.sum(-1) + hidden.sum(-1) * self.shift
        self.columns, self.hidden = positions, hidden
        return states, fed

    def feed(self, past: DynamicCache, ids: Tensor, visible: Tensor, positions: Tensor) -> Tensor:
        """The states at `positions` from a pass over what the last one hid, whose keys and values are stored anew."""
        columns, hidden = self.columns, self.hidden
        stored = visible.scatter(1, columns, visible.gather(1, columns) * ~hidden)
        number = torch.arange(columns.shape[1], device=ids.device).expand_as(columns)
        queries, keys, options = columns, [stored, hidden.long()], {}
        at = torch.zeros_like(ids).scatter(1, columns, number).gather(1, positions)
        if self.shift:
            before = (positions - 1).clamp(min=0)
            before = torch.where(visible.gather(1, before).bool(), before, positions)
            queries = torch.cat([columns, before], dim=1)
            keys.append(torch.zeros_like(before))  # which others see where they stand already
            options["token_before"] = torch.arange(queries.shape[1], device=ids.device).expand_as(queries)
            at = columns.shape[1] + torch.arange(positions.shape[1], device=ids.device).expand_as(positions)
        states = self.body(
            ids.gather(1, queries),
            mask_over(torch.cat(keys, dim=1), queries.shape[1], self.per_query),
            at,
            position_ids=count_positions(visible).gather(1, queries),
            past_key_values=past,
            **options,
        )
        write_columns(past, columns, hidden, ids.shape[1])
        return states


def write_columns(past: DynamicCache, columns: Tensor, fresh: Tensor, length: int) -> None:
    """Moves what a pass has put behind the first `length` columns of every layer to `columns` (rows, n), where `fresh`;
    the rest of it goes."""
    at, fresh = columns[:, None, :, None], fresh[:, None, :, None]
    for layer in layers_of(past):
        for name in ("keys", "values"):
            old, new = getattr(layer, name).split([length, getattr(layer, name).shape[2] - length], dim=2)
            new = torch.where(fresh, new[:, :, : columns.shape[1]], old.take_along_dim(at, 2))
            setattr(layer, name, old.scatter(2, at.expand_as(new), new))


class LastingPasses(DelayedPasses):
    """A `Source` with the cache "lasting". A row that has filled its block early waits, with its cache, for the next.

    Args:
        mask_token_id: what stands at places that are hidden.
    """

    stale: Tensor  # bool (branches x rows, columns), what each row's last pass hid and the next feeds
    places: Tensor  # (branches x rows,) which rows of those that entered the block are still at work on it

    def __init__(self, model: Any, mask_token_id: int) -> None:
        super().__init__(model, mask_token_id)
        self.rows: list[int] = []  # of the batch, those that entered the block
        self.width = 0  # no row of those at work has more stale columns
        self.waiting: list[tuple[Tensor, DynamicCache, Tensor, int]] = []  # places, past, stale and width of the others

    def enter(self, live: list[int], start: int, end: int) -> None:
        self.opening = True
        if self.past is not None and (self.waiting or live != self.rows):
            parts = [*self.waiting, (self.places, self.past, self.stale, self.width)]
            places, caches, stale, widths = zip(*parts, strict=True)
            order = torch.cat(places).argsort()
            order = order[places_of(live, self.rows, order)]
            self.past, self.stale, self.width = joined([*caches], order), torch.cat(stale)[order], max(widths)
        self.rows, self.waiting = live, []

    def keep(self, rows: Tensor) -> None:
        assert self.past is not None
        count = len(self.places)
        kept = torch.zeros(count, dtype=torch.bool, device=rows.device).index_fill_(0, rows, True)
        full = kept.byte().argsort(stable=True)[: count - len(rows)]
        self.waiting.append((self.places[full], select_rows(self.past, full), self.stale[full], self.width))
        self.past, self.stale, self.places = select_rows(self.past, rows), self.stale[rows], self.places[rows]

    def states(self, ids: Tensor, visible: Tensor, positions: Tensor) -> tuple[Tensor, Tensor]:
        hidden = self.hides(ids, positions)
        now = torch.zeros_like(ids, dtype=torch.bool).scatter(1, positions, hidden)
        if self.opening:
            self.places = torch.arange(len(ids), device=ids.device)
        if self.past is None:
            states, self.past = first_pass(self.body, ids, visible, positions, self.per_query)
            count = visible.sum(-1)
        else:
            fed = self.stale | now
            width = self.width + positions.shape[1] * self.opening
            self.columns = fed.logical_not().byte().argsort(dim=1, stable=True)[:, :width]
            self.hidden = fed.gather(1, self.columns)
            states = self.feed(self.past, ids, visible, positions)
            count = fed.sum(-1) + hidden.sum(-1) * self.shift
        self.stale, self.width, self.opening = now, positions.shape[1], False
        return states, count


def passes_of(model: Any, cache: str | None, padded: bool, mask_token_id: int) -> Source:
    """The `Source` of a model with full attention."""
    if cache == "delayed":
        return DelayedPasses(model, mask_token_id)
    if cache == "lasting":
        return LastingPasses(model, mask_token_id)
    return Passes(model, cache, padded)
