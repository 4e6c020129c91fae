"""The caches of `caching.py` for rows that are at different blocks: each feeds a part of its own, and sees another.

Rows begin their blocks together. Each feeds as many columns as the longest of them, and a mask hides what a row has no
part in, where `caching.py` cuts the same columns out of all rows.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import pad
from transformers import DynamicCache

from d1.models.attention import count_positions, takes_masks_over_queries
from d1.models.head import body_and_head
from d1.sampling.caching import check_cacheable, first_pass, joined, layers_of, mask_over, select_rows
from d1.sampling.delayed import DelayedPasses, LastingPasses


@dataclass(frozen=True)
class Place:
    """Where a row is: its tokens, without padding, before its prompt's end and before its block's start and end."""

    prompt: int
    start: int
    end: int


def spans(first: Tensor, end: Tensor, width: int) -> tuple[Tensor, Tensor]:
    """The columns from `first` (rows,) on, (rows, width), and which of them come before `end` (rows,)."""
    columns = first.unsqueeze(1) + torch.arange(width, device=first.device)
    return columns, columns < end.unsqueeze(1)


class CacheWindows:
    """`caching.Passes` with an approximate cache: the first pass of each block feeds all, the later ones a window.

    The cached keys of a window's columns stay where they are, and a mask hides them.
    """

    first: Tensor  # (branches x rows,) columns where the windows begin
    end: Tensor

    def __init__(self, model: Any, cache: str, branches: int) -> None:
        check_cacheable(model.config)
        self.body, _ = body_and_head(model)
        self.cache, self.branches = cache, branches
        self.per_query = takes_masks_over_queries(model.config)
        self.before = int(getattr(model.config, "predicts_next_token", False))
        self.past: DynamicCache | None = None

    def enter(self, places: list[Place], kept: list[int], start: int) -> None:
        """The next pass is the first of the rows' blocks; prompts end before column `start`."""
        self.past, dual = None, self.cache == "dual"
        self.first, self.end = (
            torch.tensor(columns).repeat(self.branches)
            for columns in (
                [max(0, start - row.prompt + row.start - self.before) for row in places],
                [start - row.prompt + row.end if dual else 2**62 for row in places],
            )
        )

    def keep(self, rows: Tensor) -> None:
        assert self.past is not None
        self.past.batch_select_indices(rows)
        self.first, self.end = self.first[rows], self.end[rows]

    def states(self, ids: Tensor, visible: Tensor, positions: Tensor) -> tuple[Tensor, Tensor]:
        length = ids.shape[1]
        if self.past is None:
            self.width = int((self.end.clamp(max=length) - self.first).max())  # on the host still
            self.first, self.end = (of.to(ids.device, non_blocking=True) for of in (self.first, self.end))
            states, self.past = first_pass(self.body, ids, visible, positions, self.per_query)
            return states, visible.sum(-1)
        columns, inside = spans(self.first, self.end.clamp(max=length), self.width)
        columns = columns.clamp(max=length - 1)
        fed = visible.gather(1, columns) * inside
        everywhere = torch.arange(length, device=ids.device)
        window = (everywhere >= self.first.unsqueeze(1)) & (everywhere < self.end.unsqueeze(1))
        states = self.body(
            ids.gather(1, columns),
            mask_over(torch.cat([visible.masked_fill(window, 0), fed], dim=1), self.width, self.per_query),
            (positions - self.first.unsqueeze(1)).clamp(0, self.width - 1),
            position_ids=count_positions(visible).gather(1, columns),
            past_key_values=self.past,
        )
        self.past.crop(-self.width)
        return states, fed.sum(-1)


class OwnBlocks(DelayedPasses):
    """A position may lie in a block of the row that is to come, and is none of this pass."""

    end: Tensor  # (branches x rows, 1), the column behind the row's block

    def __init__(self, model: Any, branches: int, mask_token_id: int) -> None:
        super().__init__(model, mask_token_id)
        self.branches = branches

    def ends_of(self, places: list[Place], start: int) -> Tensor:
        return torch.tensor([[start - row.prompt + row.end] for row in places]).repeat(self.branches, 1)

    def keep(self, rows: Tensor) -> None:
        super().keep(rows)
        self.end = self.end[rows]

    def hides(self, ids: Tensor, positions: Tensor) -> Tensor:
        self.end = self.end.to(ids.device, non_blocking=True)
        return super().hides(ids, positions) & (positions < self.end)


class DelayedWindows(OwnBlocks):
    """`delayed.DelayedPasses`."""

    def enter(self, places: list[Place], kept: list[int], start: int) -> None:  # type: ignore[override]
        self.past = None
        self.end = self.ends_of(places, start)


class LastingWindows(OwnBlocks, LastingPasses):
    """`delayed.LastingPasses`; new rows have a first pass of their own, which feeds all."""

    start = 0  # where prompts end

    def enter(self, places: list[Place], kept: list[int], start: int) -> None:  # type: ignore[override]
        """`kept` are the first rows' places among those before."""
        if not kept:
            self.past = None
        LastingPasses.enter(self, kept, start, start)
        if self.past is not None:
            self.move(self.past, start - self.start)
        self.rows, self.start, self.old = [*range(len(places))], start, len(kept)
        self.end = self.ends_of(places, start)

    def move(self, past: DynamicCache, columns: int) -> None:
        """Puts so many columns of padding before what is stored, or takes them away."""
        for layer in layers_of(past):
            layer.keys, layer.values = (pad(of, (0, 0, columns, 0)) for of in (layer.keys, layer.values))
        self.stale = pad(self.stale, (columns, 0))

    def states(self, ids: Tensor, visible: Tensor, positions: Tensor) -> tuple[Tensor, Tensor]:
        count = len(self.rows)
        if not (self.opening and 0 < self.old < count):
            return super().states(ids, visible, positions)
        parts: list[Any] = []
        ends = self.end.to(ids.device, non_blocking=True)
        for group in (range(self.old), range(self.old, count)):
            rows = torch.tensor([branch * count + row for branch in range(self.branches) for row in group])
            rows = rows.to(ids.device, non_blocking=True)
            self.opening, self.end = True, ends[rows]
            states, fed = super().states(ids[rows], visible[rows], positions[rows])
            parts.append((rows, self.past, self.stale, states, fed))
            self.past = None
        order = torch.cat([rows for rows, *_ in parts]).argsort()
        self.past = joined([past for _, past, *_ in parts], order)
        self.end, self.places = ends, torch.arange(len(ids), device=ids.device)
        self.stale, states, fed = (torch.cat([part[of] for part in parts])[order] for of in (2, 3, 4))
        return states, fed


class BlockWindows:
    """`caching.BlockPasses`: a block-causal model's exact cache of finished blocks.

    A row's first pass over a block feeds what is not stored yet, too: the block before or, of a new row, its prompt.
    New rows do so in a pass of their own, for padding the other rows to their prompts would cost more.
    """

    opened: Tensor  # (branches x rows, 1, hidden), what predicted the block's first hidden token in its opening pass
    past: DynamicCache  # the part of `finished`, and below of `seen`, whose rows still work on the block
    known: Tensor
    window: tuple[Tensor, Tensor]  # the columns (branches x rows, n) of the block, and which of them a row has

    def __init__(self, model: Any, branches: int) -> None:
        self.body, _ = body_and_head(model)
        self.size, self.branches = model.config.block_size, branches
        self.shift = bool(getattr(model.config, "predicts_next_token", False))
        self.stored: list[int] = []  # of each row, how many of its first tokens are in `finished`
        self.finished: DynamicCache = DynamicCache()
        self.seen = torch.zeros(0, 0)  # (branches x rows, columns) of `finished`, 1 at tokens

    def enter(self, places: list[Place], kept: list[int], start: int) -> None:
        """The next pass is the first of the rows' blocks, `kept` being the first rows' places among those before."""
        self.begin = [row.start // self.size * self.size for row in places]
        self.end = [-(row.end // -self.size) * self.size for row in places]
        self.padding = [start - row.prompt for row in places]  # columns
        self.before = [(row, self.stored[row]) for row in kept]  # place in the last batch, and tokens stored
        self.opening = True

    def of_rows(self, numbers: list[int]) -> Tensor:
        return torch.tensor(numbers, dtype=torch.long).repeat(self.branches)

    def keep(self, rows: Tensor) -> None:
        self.past = select_rows(self.past, rows) if self.known.shape[1] else DynamicCache()
        self.known = self.known[rows]
        self.window = self.window[0][rows], self.window[1][rows]
        self.opened = self.opened[rows]

    def states(self, ids: Tensor, visible: Tensor, positions: Tensor) -> tuple[Tensor, Tensor]:
        if self.opening:
            return self.open(ids, positions)
        columns, inside = self.window
        states = self.feed(self.past, self.known, columns, inside, ids, positions)
        if self.shift:
            # A block's first token is predicted by the one before it, which only the opening pass fed.
            alone = (positions == columns[:, :1]) & self.known.any(1, keepdim=True)
            states = torch.where(alone.unsqueeze(-1), self.opened, states)
        return states, inside.sum(-1)

    def feed(
        self, past: DynamicCache, known: Tensor, columns: Tensor, inside: Tensor, ids: Tensor, positions: Tensor
    ) -> Tensor:
        """The states at `positions`, columns of the canvas, from a pass over its `columns` (rows, n) where `inside`."""
        width = columns.shape[1]
        mask = torch.cat([known, inside.long()], dim=1)
        states = self.body(
            ids.gather(1, columns.clamp(0, ids.shape[1] - 1)),
            mask,
            (positions - columns[:, :1]).clamp(0, width - 1),
            position_ids=count_positions(mask)[:, -width:],
            past_key_values=past,
        )
        past.crop(-self.widest)
        return states

    def open(self, ids: Tensor, positions: Tensor) -> tuple[Tensor, Tensor]:
        """The first pass over the rows' blocks, of those that have a cache and of those that have none."""
        device, count, old = ids.device, len(self.begin), len(self.before)
        last = [min(end, ids.shape[1] - left) for end, left in zip(self.end, self.padding, strict=True)]
        self.widest = max(end - begin for begin, end in zip(self.begin, last, strict=True))
        stored = [tokens for _, tokens in self.before] + [0] * (count - old)
        begin, end, first = (
            self.of_rows([number + left for number, left in zip(of, self.padding, strict=True)]).to(device)
            for of in (self.begin, last, stored)
        )
        parts = []
        for group in (range(old), range(old, count)):
            if not group:
                continue
            past, known = self.stored_blocks() if group[0] < old else (DynamicCache(), begin.new_zeros(0, 0))
            rows = torch.tensor([branch * count + row for branch in range(self.branches) for row in group]).to(device)
            more = max(self.begin[row] - stored[row] for row in group)
            columns, inside = spans(begin[rows] - more, end[rows], more + self.widest)
            inside &= columns >= first[rows].unsqueeze(1)
            known = known if len(known) else begin.new_zeros(len(rows), 0)
            states = self.feed(past, known, columns, inside, ids[rows], positions[rows])
            parts.append((rows, past, torch.cat([known, inside[:, :more].long()], dim=1), states, inside.sum(-1)))
        order = torch.cat([rows for rows, *_ in parts]).argsort()
        self.finished, self.seen = joined_caches([(past, seen) for _, past, seen, _, _ in parts], order)
        states = torch.cat([states for *_, states, _ in parts])[order]
        fed = torch.cat([fed for *_, fed in parts])[order]
        self.stored, self.opening = self.begin, False
        self.past, self.known, self.window = self.finished, self.seen, spans(begin, end, self.widest)
        self.opened = states[:, :1]
        return states, fed

    def stored_blocks(self) -> tuple[DynamicCache, Tensor]:
        """The cache of the rows that were there before, without columns of padding, and its (rows, columns) tokens."""
        held = len(self.seen) // self.branches
        rows = torch.tensor([row + branch * held for branch in range(self.branches) for row, _ in self.before])
        longest = max(tokens for _, tokens in self.before)
        if not longest:
            return DynamicCache(), self.seen[rows.to(self.seen.device), :0]
        seen = self.seen[rows.to(self.seen.device)]
        columns = seen.argsort(dim=1, stable=True)[:, -longest:]  # tokens last, in their order
        past = select_rows(self.finished, rows.to(seen.device))
        for layer in layers_of(past):
            at = columns[:, None, :, None]
            layer.keys = layer.keys.take_along_dim(at, dim=2)
            layer.values = layer.values.take_along_dim(at, dim=2)
        return past, seen.gather(1, columns)


def joined_caches(parts: list[tuple[DynamicCache, Tensor]], order: Tensor) -> tuple[DynamicCache, Tensor]:
    """One cache of the rows of all parts, padded on the left, in the order `order`; and its (rows, columns) tokens."""
    if len(parts) == 1:
        return parts[0]
    width = max(seen.shape[1] for _, seen in parts)
    seen = torch.cat([pad(seen, (width - seen.shape[1], 0)) for _, seen in parts])[order]
    return joined([past for past, _ in parts], order), seen
