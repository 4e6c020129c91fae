"""Caches whose passes process a window of the canvas and read the keys and values of the other columns.

For full attention, the cache is that of Fast-dLLM (arXiv 2505.22618, section 3.2), an approximation. The first pass of
each block processes the whole canvas; later passes process a window and read the rest as it was in the first pass.
    prefix   the window is the block and all columns after it
    dual     the window is the block only

For block-causal attention, the cache is exact, because no earlier token sees a block (BD3-LM, arXiv 2503.09573, section
3.1). Keys contain their rotary position, so the keys of a window may follow the cached ones in any order.
"""

from __future__ import annotations

from dataclasses import dataclass
from operator import sub
from typing import Any

import torch
from torch import Tensor
from transformers import DynamicCache

from d1.models.attention import count_positions
from d1.sampling.passes import Passes, Place, layers_of, same_layers, select_rows


@dataclass
class Window:
    """The columns that passes process, and the cache that they read."""

    past: DynamicCache
    stored: Tensor  # (rows, cached) 1 where a query sees the keys and values of `past`
    columns: Tensor  # (rows, n) of the canvas, consecutive; where `fed` is 0 they may lie outside it
    fed: Tensor  # (rows, n) 1 at the columns that are processed for the row
    positions: Tensor  # (rows, n) position ids

    @classmethod
    def of(cls, past: DynamicCache, stored: Tensor, visible: Tensor, first: Tensor, end: Tensor, width: int) -> Window:
        """The window of `width` columns from `first` (rows,). Only columns before `end` (rows,) are processed."""
        columns = first.unsqueeze(1) + torch.arange(width, device=first.device)
        inside = columns.clamp(0, visible.shape[1] - 1)
        fed = visible.gather(1, inside) * (columns < end.unsqueeze(1))
        return cls(past, stored, columns, fed, count_positions(visible).gather(1, inside))

    def of_rows(self, rows: Tensor) -> Window:
        tensors = (self.stored, self.columns, self.fed, self.positions)
        return Window(select_rows(self.past, rows), *(tensor[rows] for tensor in tensors))


class WindowPasses(Passes):
    """A first pass for each block, which makes the window, and later passes over that window."""

    window: Window | None

    def enter(self, places: list[Place], kept: list[int]) -> None:
        self.places, self.kept, self.window = places, kept, None

    def keep(self, rows: Tensor) -> None:
        assert self.window is not None
        self.window = self.window.of_rows(rows)

    def states(self, ids: Tensor, visible: Tensor, positions: Tensor) -> tuple[Tensor, Tensor]:
        if self.window is None:
            self.window, states, fed = self.first_pass(ids, visible, positions)
            return states, fed
        states = self.feed(self.window, ids, positions)
        self.window.past.crop(-self.window.columns.shape[1])
        return states, self.window.fed.sum(-1)

    def first_pass(self, ids: Tensor, visible: Tensor, positions: Tensor) -> tuple[Window, Tensor, Tensor]:
        """The window of the later passes, and the two results of `states` for this pass."""
        raise NotImplementedError

    def feed(self, window: Window, ids: Tensor, positions: Tensor) -> Tensor:
        """The states at `positions` from a pass over the window, whose keys and values go to its cache."""
        columns, width = window.columns, window.columns.shape[1]
        return self.body(
            ids.gather(1, columns.clamp(0, ids.shape[1] - 1)),
            self.mask(torch.cat([window.stored, window.fed], dim=1), width),
            (positions - columns[:, :1]).clamp(0, width - 1),
            position_ids=window.positions,
            past_key_values=window.past,
        )


class Windows(WindowPasses):
    """The caches "prefix" (`to_end`) and "dual"."""

    def __init__(self, model: Any, *, to_end: bool, **options: Any) -> None:
        super().__init__(model, **options)
        self.to_end = to_end
        self.masked |= not self.aligned

    def first_pass(self, ids: Tensor, visible: Tensor, positions: Tensor) -> tuple[Window, Tensor, Tensor]:
        past, length = DynamicCache(), ids.shape[1]
        states = self.feed_all(ids, visible, positions, past)
        firsts = [max(0, place.start - self.shift) for place in self.places]
        ends = [length if self.to_end else min(place.end, length) for place in self.places]
        first, end = self.of_rows(firsts), self.of_rows(ends)
        if self.aligned:
            stored = without_columns(visible, 1, firsts[0], ends[0])
            for layer in layers_of(past):
                layer.keys, layer.values = (
                    without_columns(of, 2, firsts[0], ends[0]) for of in (layer.keys, layer.values)
                )
        else:
            everywhere = torch.arange(length, device=ids.device)
            stored = visible.masked_fill((everywhere >= first.unsqueeze(1)) & (everywhere < end.unsqueeze(1)), 0)
        window = Window.of(past, stored, visible, first, end, max(map(sub, ends, firsts)))
        return window, states, visible.sum(-1)


def without_columns(values: Tensor, dim: int, first: int, end: int) -> Tensor:
    """`values` without the entries from `first` up to `end` of a dimension."""
    return torch.cat([values.narrow(dim, 0, first), values.narrow(dim, end, values.shape[dim] - end)], dim=dim)


class FinishedBlocks(WindowPasses):
    """The exact cache of a block-causal model's finished blocks.

    A pass processes those blocks of the model that the filled block touches. The first of these passes also processes
    what is not stored yet: the previous block, which is complete only now, or the prompt of a new row. The last block
    is not stored.
    """

    finished: DynamicCache  # of all rows that entered the block; the window's cache has only those still at work on it
    seen: Tensor  # (rows, columns) of `finished`, 1 at tokens
    opened: Tensor  # (rows, 1, hidden), the state that predicted the block's first hidden token in the first pass

    def __init__(self, model: Any, **options: Any) -> None:
        super().__init__(model, **options)
        self.masked, self.size = True, model.config.block_size
        self.stored: list[int] = []  # how many columns of each row are in `finished`, from its origin

    def keep(self, rows: Tensor) -> None:
        super().keep(rows)
        self.opened = self.opened[rows]

    def states(self, ids: Tensor, visible: Tensor, positions: Tensor) -> tuple[Tensor, Tensor]:
        window = self.window
        states, fed = super().states(ids, visible, positions)
        if window is None:
            self.opened = states[:, :1]
        elif self.shift:
            # A block's first token is predicted from the token before it, which only the first pass processed.
            alone = (positions == window.columns[:, :1]) & window.stored.any(1, keepdim=True)
            states = torch.where(alone.unsqueeze(-1), self.opened, states)
        return states, fed

    def first_pass(self, ids: Tensor, visible: Tensor, positions: Tensor) -> tuple[Window, Tensor, Tensor]:
        count, old, size = len(self.places), len(self.kept), self.size
        origins = [place.origin for place in self.places]
        firsts = [place.start - (place.start - place.boundary) % size for place in self.places]
        ends = [min(place.end + (place.boundary - place.end) % size, ids.shape[1]) for place in self.places]
        stored = [self.stored[row] for row in self.kept] + [0] * (count - old)
        known = [origin + tokens for origin, tokens in zip(origins, stored, strict=True)]
        width, first, end = max(map(sub, ends, firsts)), self.of_rows(firsts), self.of_rows(ends)
        fed_before = self.of_rows(known)

        def feed(group: range, rows: Any) -> tuple[DynamicCache, Tensor, Tensor, Tensor]:
            past, seen = self.kept_blocks() if group[0] < old else (DynamicCache(), visible[rows, :0])
            more = max(firsts[row] - known[row] for row in group)
            window = Window.of(past, seen, visible[rows], first[rows] - more, end[rows], more + width)
            window.fed *= window.columns >= fed_before[rows].unsqueeze(1)
            states = self.feed(window, ids[rows], positions[rows])
            past.crop(-width)
            return past, torch.cat([seen, window.fed[:, :more]], dim=1), states, window.fed.sum(-1)

        self.finished, self.seen, states, fed = self.feed_apart(old, count, feed)
        self.stored = [first - origin for first, origin in zip(firsts, origins, strict=True)]
        return Window.of(self.finished, self.seen, visible, first, end, width), states, fed

    def kept_blocks(self) -> tuple[DynamicCache, Tensor]:
        """The cache of the `kept` rows without columns of padding, and (rows, columns) 1 at its tokens."""
        past, seen, count = self.finished, self.seen, len(self.stored)
        if self.kept != [*range(count)]:
            rows = self.in_branches(self.kept, count)
            past, seen = select_rows(past, rows), seen[rows]
        longest = max(self.stored[row] for row in self.kept)
        if not longest:
            return DynamicCache(), seen[:, :0]
        if all(self.stored[row] == seen.shape[1] for row in self.kept):
            return past, seen
        columns = seen.argsort(dim=1, stable=True)[:, -longest:]  # tokens last, in their order
        at = columns[:, None, :, None]
        past = same_layers(past)
        for layer in layers_of(past):
            layer.keys, layer.values = (of.take_along_dim(at, dim=2) for of in (layer.keys, layer.values))
        return past, seen.gather(1, columns)
