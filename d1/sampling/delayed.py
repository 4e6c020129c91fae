"""Caches whose passes process only the tokens that have changed, without a window around them.

delayed  the first pass of each block processes all tokens; a later pass processes the tokens that were still hidden in
         the pass before it, so that a token is processed once more after it was revealed, and then cached (dKV-Cache,
         arXiv 2505.15781, section 3.2)
lasting  the same, but the cache is kept from block to block: only a row's very first pass processes all tokens
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import pad
from transformers import DynamicCache

from d1.models.attention import count_positions
from d1.sampling.passes import Passes, Place, join_rows, layers_of, select_rows


class DelayedPasses(Passes):
    """The caches "delayed" and "lasting". With `lasts`, rows whose block is full wait and keep their cache."""

    past: DynamicCache | None = None
    start: Tensor  # (rows, 1), the first column of the row's block
    end: Tensor  # (rows, 1), the column after it
    stale: Tensor  # bool (rows, columns), what was hidden in each row's last pass; the next pass processes it
    places: Tensor  # (rows,) which of the rows that entered the block still work on it

    def __init__(self, model: Any, *, lasts: bool, **options: Any) -> None:
        super().__init__(model, **options)
        self.lasts, self.masked = lasts, True
        self.origins: list[int] = []  # of the rows that entered the block
        self.width = 0  # upper limit of the stale columns per row at work
        self.waiting: list[tuple[Tensor, DynamicCache, Tensor, int]] = []  # places, past, stale, width of waiting rows

    def enter(self, places: list[Place], kept: list[int]) -> None:
        past, entered, kept = self.past, len(self.origins), kept if self.lasts else []
        self.past, self.end = None, self.of_rows([place.end for place in places]).unsqueeze(1)
        self.start = self.of_rows([place.start for place in places]).unsqueeze(1)
        if kept:
            assert past is not None
            if self.waiting or kept != [*range(entered)]:
                parts = [*self.waiting, (self.places, past, self.stale, self.width)]
                numbers, caches, stale, widths = zip(*parts, strict=True)
                order = torch.cat(numbers).argsort()[self.in_branches(kept, entered)]
                past, self.stale, self.width = join_rows([*caches], order), torch.cat(stale)[order], max(widths)
            self.move(past, places[0].origin - self.origins[kept[0]])
            self.past = past
        self.opening, self.old, self.waiting = True, len(kept), []
        self.origins = [place.origin for place in places]

    def move(self, past: DynamicCache, columns: int) -> None:
        """Add so many columns of padding before what is stored or, if negative, remove them."""
        if columns:
            for layer in layers_of(past):
                layer.keys, layer.values = (pad(of, (0, 0, columns, 0)) for of in (layer.keys, layer.values))
            self.stale = pad(self.stale, (columns, 0))

    def keep(self, rows: Tensor) -> None:
        assert self.past is not None
        if self.lasts:
            kept = torch.zeros_like(self.places, dtype=torch.bool).index_fill_(0, rows, True)
            full = kept.byte().argsort(stable=True)[: len(kept) - len(rows)]
            self.waiting.append((self.places[full], select_rows(self.past, full), self.stale[full], self.width))
        self.past, self.stale, self.places = select_rows(self.past, rows), self.stale[rows], self.places[rows]
        self.start, self.end = self.start[rows], self.end[rows]

    def states(self, ids: Tensor, visible: Tensor, positions: Tensor) -> tuple[Tensor, Tensor]:
        # Rows with fewer hidden tokens than others are padded with places that are not hidden.
        hidden = (ids.gather(1, positions) == self.mask_token_id) & (positions >= self.start) & (positions < self.end)
        now = torch.zeros_like(ids, dtype=torch.bool).scatter(1, positions, hidden)

        def feed(group: range, rows: Any) -> tuple[DynamicCache, Tensor, Tensor, Tensor]:
            if group[0] >= old:
                past = DynamicCache()
                states = self.feed_all(ids[rows], visible[rows], positions[rows], past)
                return past, now[rows], states, visible[rows].sum(-1)
            assert self.past is not None
            fed = self.stale | now[rows]
            width = self.width + positions.shape[1] * self.opening
            columns = fed.logical_not().byte().argsort(dim=1, stable=True)[:, :width]
            given = ids[rows], visible[rows], positions[rows]
            states = self.feed(self.past, *given, columns, fed.gather(1, columns))
            # Where logits predict the next token, the tokens before the hidden ones are processed, too.
            return self.past, now[rows], states, fed.sum(-1) + hidden[rows].sum(-1) * self.shift

        count = len(ids) // self.branches
        old = self.old if self.opening else count
        if self.opening:
            self.places = torch.arange(len(ids), device=ids.device)
        self.past, self.stale, states, fed = self.feed_apart(old, count, feed)
        self.width, self.opening = positions.shape[1], False
        return states, fed

    def feed(
        self, past: DynamicCache, ids: Tensor, visible: Tensor, positions: Tensor, columns: Tensor, fed: Tensor
    ) -> Tensor:
        """The states at `positions` from a pass over those of `columns` (rows, n) that are `fed`; the cache then holds
        their new keys and values."""
        stored = visible.scatter(1, columns, visible.gather(1, columns) * ~fed)
        number = torch.arange(columns.shape[1], device=ids.device).expand_as(columns)
        queries, keys, options = columns, [stored, fed.long()], {}
        at = torch.zeros_like(ids).scatter(1, columns, number).gather(1, positions)
        if self.shift:
            before = (positions - 1).clamp(min=0)
            before = torch.where(visible.gather(1, before).bool(), before, positions)
            queries = torch.cat([columns, before], dim=1)
            keys.append(torch.zeros_like(before))  # hidden as keys: other tokens see them at their own columns
            options["token_before"] = torch.arange(queries.shape[1], device=ids.device).expand_as(queries)
            at = columns.shape[1] + torch.arange(positions.shape[1], device=ids.device).expand_as(positions)
        states = self.body(
            ids.gather(1, queries),
            self.mask(torch.cat(keys, dim=1), queries.shape[1]),
            at,
            position_ids=count_positions(visible).gather(1, queries),
            past_key_values=past,
            **options,
        )
        write_columns(past, columns, fed, ids.shape[1])
        return states


def write_columns(past: DynamicCache, columns: Tensor, fresh: Tensor, length: int) -> None:
    """Move what a pass has appended after the first `length` columns to the `fresh` ones of `columns` (rows, n)."""
    at, fresh = columns[:, None, :, None], fresh[:, None, :, None]
    for layer in layers_of(past):
        for name in ("keys", "values"):
            old, new = getattr(layer, name).split([length, getattr(layer, name).shape[2] - length], dim=2)
            new = torch.where(fresh, new[:, :, : columns.shape[1]], old.take_along_dim(at, 2))
            setattr(layer, name, old.scatter(2, at.expand_as(new), new))
