"""Forward passes that give a step its hidden states, with or without cached keys and values."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from operator import sub
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import pad
from transformers import DynamicCache

from d1.models.attention import count_positions, over_queries, takes_masks_over_queries
from d1.sampling.graphs import forward_pass
from d1.sampling.kv_cache import join_rows, layers_of, read_only, same_layers, select_rows
from d1.transformers_bridge import CACHE


@dataclass
class Columns:
    """The keys and values of the first tokens of a row's text, for a later text that begins with the same tokens.

    The exact caches of models with blocks take what is there when a row begins, and leave what they have stored when it
    ends: the prompt and the finished blocks. Other passes leave nothing.

    Attributes:
        layers: keys and values (heads, tokens, size) of each layer.
        wanted: whether anyone reads what a row would leave.
    """

    layers: list[tuple[Tensor, Tensor]] = field(default_factory=list)
    wanted: bool = True

    @property
    def tokens(self) -> int:
        return self.layers[0][0].shape[1] if self.layers else 0

    def crop(self, tokens: int) -> None:
        """Drops all columns after those of the first `tokens`."""
        self.layers = [(keys[:, :tokens], values[:, :tokens]) for keys, values in self.layers]

    def free(self) -> None:
        self.layers = []


class Block(NamedTuple):
    """The positions of the canvas where a row fills its block: from `start` up to but not including `end`."""

    start: int
    end: int
    origin: int  # the first position that is processed; those before it are padding
    boundary: int  # a position where a block of a block-causal model begins
    causal: bool = False  # with a causal context: the first pass predicts the first token from the text before it
    columns: Columns | None = None  # of the row, counted from its origin


class Passes:
    """Passes that process the whole text, and the base class of the caches. Tensors hold the rows of all branches.

    Args:
        branches: 2 with guidance, otherwise 1.
        mask_token_id: the token at hidden positions.
        masked: whether a pass needs an attention mask, because some position is invisible or, in a cache, may be.
        aligned: whether all rows fill the same positions.
    """

    def __init__(
        self, model: Any, *, branches: int, mask_token_id: int, device: Any, masked: bool, aligned: bool
    ) -> None:
        self.backbone = forward_pass(model)
        self.branches, self.mask_token_id, self.device = branches, mask_token_id, device
        self.masked, self.aligned = masked, aligned
        self.over_queries = takes_masks_over_queries(model.config)
        # Where logits predict the next token, the state for a position is that of the token before it.
        self.shift = int(getattr(model.config, "predicts_next_token", False))

    def enter(self, blocks: list[Block], kept: list[int]) -> None:
        """Begin new blocks: the next pass is the first of these blocks, one per row. The first rows continue from
        the last block, where their numbers were `kept`; the rows after them are new."""

    def keep(self, rows: Tensor) -> None:
        """Continue, until the next block, with only these rows of the last pass."""

    def leave(self, row: int, columns: Columns) -> None:
        """Leaves what is stored of a row that ends; `row` is its number among those that entered the last block."""

    def states(self, ids: Tensor, visible: Tensor, positions: Tensor) -> tuple[Tensor, Tensor]:
        """Aligned last hidden states (rows, n, hidden) at `positions` (rows, n), which lie in the rows' blocks, and
        (rows,) how many real tokens of each row were processed; `ids` and `visible` are (rows, length)."""
        return self.feed_all(ids, visible, positions), visible.sum(-1)

    def feed_all(self, ids: Tensor, visible: Tensor, positions: Tensor, past: DynamicCache | None = None) -> Tensor:
        """The states at `positions` from a pass over the whole text, whose keys and values go to `past`."""
        options: dict[str, Any] = {} if past is None else {CACHE: past}
        if self.masked and self.over_queries:
            options["position_ids"] = count_positions(visible)
        return self.backbone(ids, self.mask(visible, ids.shape[1]), positions, **options)

    def feed_apart(
        self, old: int, count: int, feed: Callable[[range, Any], tuple[DynamicCache, Tensor, Tensor, Tensor]]
    ) -> tuple[DynamicCache, Tensor, Tensor, Tensor]:
        """Run one pass for the first `old` of `count` rows, which have a cache, and one for the others, which do not.

        `feed` gets the numbers of the rows within a branch, and the index of these rows in all branches. It returns
        their cache, a tensor (rows, keys) about its keys, and the two results of `states`, as this does for all rows.
        """
        groups = [group for group in (range(old), range(old, count)) if group]
        if len(groups) == 1:
            return feed(groups[0], slice(None))
        rows = [self.in_branches([*group], count) for group in groups]
        pasts, about_keys, states, fed = zip(*map(feed, groups, rows), strict=True)
        order, width = torch.cat(rows).argsort(), max(of.shape[1] for of in about_keys)
        wide = torch.cat([pad(of, (width - of.shape[1], 0)) for of in about_keys])
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


# --- Windows: passes that process a part of the canvas and read the keys and values of the rest -----------------------
#
# For full attention, the cache is that of Fast-dLLM (arXiv 2505.22618, section 3.2), an approximation. The first pass
# of each block processes the whole canvas; later passes process a window and read the rest as it was in the first pass.
#     prefix   the window is the block and all positions after it
#     dual     the window is the block only
#
# For block-causal attention, the cache is exact, because no earlier token sees a block (BD3-LM, arXiv 2503.09573,
# section 3.1). Keys contain their rotary position, so the keys of a window may follow the cached ones in any order.


@dataclass
class Window:
    """The positions that passes process, and the cache that they read."""

    past: DynamicCache
    stored: Tensor  # (rows, cached) 1 where a query sees the keys and values of `past`
    positions: Tensor  # (rows, n) of the text, consecutive; where `fed` is 0 they may lie outside it
    fed: Tensor  # (rows, n) 1 at the positions that are processed for the row
    position_ids: Tensor  # (rows, n)
    starts: Tensor | None = None  # (rows, 1) with a causal context, the first position of the opened block

    @classmethod
    def of(cls, past: DynamicCache, stored: Tensor, visible: Tensor, first: Tensor, end: Tensor, width: int) -> Window:
        """The window of `width` positions from `first` (rows,). Only positions before `end` (rows,) are processed."""
        positions = first.unsqueeze(1) + torch.arange(width, device=first.device)
        inside = positions.clamp(0, visible.shape[1] - 1)
        fed = visible.gather(1, inside) * (positions < end.unsqueeze(1))
        return cls(past, stored, positions, fed, count_positions(visible).gather(1, inside))

    def of_rows(self, rows: Tensor) -> Window:
        past, starts = select_rows(self.past, rows), None if self.starts is None else self.starts[rows]
        stored, positions = self.stored[rows], self.positions[rows]
        return Window(past, stored, positions, self.fed[rows], self.position_ids[rows], starts)


class WindowPasses(Passes):
    """A first pass for each block, which makes the window, and later passes over that window."""

    window: Window | None

    def enter(self, blocks: list[Block], kept: list[int]) -> None:
        self.blocks, self.kept, self.window = blocks, kept, None

    def keep(self, rows: Tensor) -> None:
        assert self.window is not None
        self.window = self.window.of_rows(rows)

    def states(self, ids: Tensor, visible: Tensor, positions: Tensor) -> tuple[Tensor, Tensor]:
        if self.window is None:
            self.window, states, fed = self.first_pass(ids, visible, positions)
            return states, fed
        # The window's own keys and values change in the next pass, so none of them is kept.
        reading = replace(self.window, past=read_only(self.window.past))
        return self.feed(reading, ids, positions), self.window.fed.sum(-1)

    def first_pass(self, ids: Tensor, visible: Tensor, positions: Tensor) -> tuple[Window, Tensor, Tensor]:
        """The window of the later passes, and the two results of `states` for this pass."""
        raise NotImplementedError

    def feed(self, window: Window, ids: Tensor, positions: Tensor) -> Tensor:
        """The states at `positions` from a pass over the window, whose keys and values go to its cache."""
        inside, width = window.positions, window.positions.shape[1]
        options: dict[str, Any] = {CACHE: window.past}
        if window.starts is not None:
            options["opened"] = torch.cat([torch.zeros_like(window.stored), inside >= window.starts], dim=1).bool()
        return self.backbone(
            ids.gather(1, inside.clamp(0, ids.shape[1] - 1)),
            self.mask(torch.cat([window.stored, window.fed], dim=1), width),
            (positions - inside[:, :1]).clamp(0, width - 1),
            position_ids=window.position_ids,
            **options,
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
        # The window's keys leave the cache where all rows have the same window, or are hidden where they differ.
        firsts = [max(0, block.start - self.shift) for block in self.blocks]
        ends = [length if self.to_end else min(block.end, length) for block in self.blocks]
        first, end = self.of_rows(firsts), self.of_rows(ends)
        if self.aligned:
            stored = without(visible, 1, firsts[0], ends[0])
            for layer in layers_of(past):
                layer.keys, layer.values = (without(of, 2, firsts[0], ends[0]) for of in (layer.keys, layer.values))
        else:
            everywhere = torch.arange(length, device=ids.device)
            stored = visible.masked_fill((everywhere >= first.unsqueeze(1)) & (everywhere < end.unsqueeze(1)), 0)
        window = Window.of(past, stored, visible, first, end, max(map(sub, ends, firsts)))
        return window, states, visible.sum(-1)


def without(values: Tensor, dim: int, first: int, end: int) -> Tensor:
    """`values` without the entries from `first` up to `end` of a dimension."""
    return torch.cat([values.narrow(dim, 0, first), values.narrow(dim, end, values.shape[dim] - end)], dim=dim)


class FinishedBlocks(WindowPasses):
    """The exact cache of a block-causal model's finished blocks.

    A pass processes those blocks of the model that the filled block touches. The first of these passes also processes
    what is not stored yet: the previous block, which is complete only now, or the prompt of a new row.
    """

    finished: DynamicCache  # of all rows that entered the block; the window's cache has only those still at work on it
    seen: Tensor  # (rows, keys) of `finished`, 1 at tokens
    opened: Tensor  # (rows, 1, hidden), the state that predicted the block's first hidden token in the first pass

    def __init__(self, model: Any, **options: Any) -> None:
        super().__init__(model, **options)
        self.masked, self.size = True, model.config.block_size
        self.stored: list[int] = []  # how many positions of each row are in `finished`, from its origin

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
            alone = (positions == window.positions[:, :1]) & window.stored.any(1, keepdim=True)
            states = torch.where(alone.unsqueeze(-1), self.opened, states)
        return states, fed

    def first_pass(self, ids: Tensor, visible: Tensor, positions: Tensor) -> tuple[Window, Tensor, Tensor]:
        count, old = len(self.blocks), len(self.kept)
        origins = [block.origin for block in self.blocks]
        firsts, ends = map(list, zip(*(self.processed(block, ids.shape[1]) for block in self.blocks), strict=True))
        # Blocks whose first token is predicted from the clean text take no part in this pass.
        now = [first if block.causal else end for block, first, end in zip(self.blocks, firsts, ends, strict=True)]
        stored = [self.stored[row] for row in self.kept] + [self.readable(block) for block in self.blocks[old:]]
        known = [origin + tokens for origin, tokens in zip(origins, stored, strict=True)]
        width, ahead = max(map(sub, ends, firsts)), max(map(sub, now, firsts))
        first, end, fed_before, fed_end = map(self.of_rows, (firsts, ends, known, now))
        asked = positions - (first == fed_end).long().unsqueeze(1)  # the token before the first one

        def feed(group: range, rows: Any) -> tuple[DynamicCache, Tensor, Tensor, Tensor]:
            past, seen = self.kept_blocks() if group[0] < old else self.read_blocks(stored[old:])
            more = max(firsts[row] - known[row] for row in group)
            # One window for all rows of the group: it starts with the `more` positions that are not stored yet.
            window = Window.of(past, seen, visible[rows], first[rows] - more, fed_end[rows], more + ahead)
            window.fed *= window.positions >= fed_before[rows].unsqueeze(1)
            window.starts = self.starts_of(first[rows])
            states = self.feed(window, ids[rows], asked[rows])
            if ahead:
                past.crop(-ahead)
            return past, torch.cat([seen, window.fed[:, :more]], dim=1), states, window.fed.sum(-1)

        self.finished, self.seen, states, fed = self.feed_apart(old, count, feed)
        self.stored = [first - origin for first, origin in zip(firsts, origins, strict=True)]
        window = Window.of(self.finished, self.seen, visible, first, end, width)
        window.starts = self.starts_of(first)
        return window, states, fed

    def readable(self, block: Block) -> int:
        """How many columns a new row reads: whole blocks, without the last token, which may predict the next one."""
        tokens = 0 if block.columns is None else min(block.columns.tokens, block.start - block.origin - 1)
        return max(tokens - tokens % self.size, 0)

    def read_blocks(self, counts: list[int]) -> tuple[DynamicCache, Tensor]:
        """A cache of the first `counts` columns of the new rows, and (rows, keys) 1 at their tokens. The rows keep
        nothing of theirs."""
        past, longest = DynamicCache(), max(counts)
        given = [block.columns for block in self.blocks[len(self.kept) :]]
        readers = [(row, one.layers) for row, one in enumerate(given) if one is not None and counts[row]]
        for number, like in enumerate(readers[0][1] if readers else []):
            keys, values = (of.new_zeros(len(counts), of.shape[0], longest, of.shape[2]) for of in like)
            for row, layers in readers:
                for to, of in zip((keys, values), layers[number], strict=True):
                    to[row, :, longest - counts[row] :] = of[:, : counts[row]]
            past.update(keys, values, number)
        for one in filter(None, given):
            one.free()
        tokens = torch.arange(longest, 0, -1, device=self.device) <= self.of_rows(counts).unsqueeze(1)
        return past, tokens.long()

    def leave(self, row: int, columns: Columns) -> None:
        tokens = self.stored[row]
        columns.free()
        if tokens and self.branches == 1:  # without a prompt, as in guidance, the text is another one in each turn
            at = self.seen[row].argsort(stable=True)[-tokens:]  # tokens last, in their order
            columns.layers = [(layer.keys[row][:, at], layer.values[row][:, at]) for layer in layers_of(self.finished)]

    def processed(self, block: Block, length: int) -> tuple[int, int]:
        """The first position of the model's blocks that a block touches, and the position after them."""
        first = block.start - (block.start - block.boundary) % self.size
        return first, min(block.end + (block.boundary - block.end) % self.size, length)

    def starts_of(self, first: Tensor) -> Tensor | None:
        """`Window.starts` for the `first` positions (rows,) of blocks."""
        return None

    def kept_blocks(self) -> tuple[DynamicCache, Tensor]:
        """The cache of the `kept` rows without padding, and (rows, keys) 1 at its tokens."""
        past, seen, count = self.finished, self.seen, len(self.stored)
        if self.kept != [*range(count)]:
            rows = self.in_branches(self.kept, count)
            past, seen = select_rows(past, rows), seen[rows]
        longest = max(self.stored[row] for row in self.kept)
        if not longest:
            return DynamicCache(), seen[:, :0]
        if all(self.stored[row] == seen.shape[1] for row in self.kept):
            return past, seen
        order = seen.argsort(dim=1, stable=True)[:, -longest:]  # tokens last, in their order
        at = order[:, None, :, None]
        past = same_layers(past)
        for layer in layers_of(past):
            layer.keys, layer.values = (of.take_along_dim(at, dim=2) for of in (layer.keys, layer.values))
        return past, seen.gather(1, order)


class CausalContext(FinishedBlocks):
    """The exact cache of a model with a causal context: of the prompt and the finished blocks, which see only what is
    before them, so that blocks may have any length.

    A block's first pass processes what is not stored yet. It predicts the block's first token from that text or, if
    this token is masked, also processes the block (`Block.causal`).
    """

    def __init__(self, model: Any, **options: Any) -> None:
        super().__init__(model, **options)
        self.size = 1  # clean text is causal token by token

    def processed(self, block: Block, length: int) -> tuple[int, int]:
        return block.start, min(block.end, length)

    def starts_of(self, first: Tensor) -> Tensor | None:
        return first.unsqueeze(1)


class RecomputedContext(Passes):
    """The same passes over the whole text: the clean text before each row's block, and the block."""

    def enter(self, blocks: list[Block], kept: list[int]) -> None:
        self.start, self.end = (self.of_rows([getattr(block, of) for block in blocks]) for of in ("start", "end"))
        self.causal = self.of_rows([int(block.causal) for block in blocks])  # only in the first pass of the block

    def keep(self, rows: Tensor) -> None:
        self.start, self.end, self.causal = self.start[rows], self.end[rows], self.causal[rows]

    def states(self, ids: Tensor, visible: Tensor, positions: Tensor) -> tuple[Tensor, Tensor]:
        start, end, causal = (of.unsqueeze(1) for of in (self.start, self.end, self.causal))
        everywhere = torch.arange(ids.shape[1], device=ids.device)
        opened = (everywhere >= start) & (everywhere < end) & (causal == 0)
        self.causal = torch.zeros_like(self.causal)
        return self.backbone(ids, self.mask(visible, ids.shape[1]), positions - causal, opened=opened), visible.sum(-1)


# --- Delayed: passes that process only the tokens that have changed ---------------------------------------------------
#
# delayed  the first pass of each block processes all tokens; a later pass processes the tokens that were still hidden
#          in the pass before it: a token is processed once more after it was revealed, and then cached (dKV-Cache,
#          arXiv 2505.15781, section 3.2)
# lasting  the same, but the cache is kept from block to block: only a row's very first pass processes all tokens


class DelayedPasses(Passes):
    """The caches "delayed" and "lasting". With `lasts`, rows whose block is full wait and keep their cache."""

    past: DynamicCache | None = None
    start: Tensor  # (rows, 1), the first position of the row's block
    end: Tensor  # (rows, 1), the position after it
    stale: Tensor  # bool (rows, length), what was hidden in each row's last pass; the next pass processes it
    at_work: Tensor  # (rows,) which of the rows that entered the block still work on it

    def __init__(self, model: Any, *, lasts: bool, **options: Any) -> None:
        super().__init__(model, **options)
        self.lasts, self.masked = lasts, True
        self.origins: list[int] = []  # of the rows that entered the block
        self.width = 0  # upper limit of the stale positions per row at work
        self.waiting: list[tuple[Tensor, DynamicCache, Tensor, int]] = []  # at_work, past, stale, width of waiting rows

    def enter(self, blocks: list[Block], kept: list[int]) -> None:
        past, entered, kept = self.past, len(self.origins), kept if self.lasts else []
        self.past, self.end = None, self.of_rows([block.end for block in blocks]).unsqueeze(1)
        self.start = self.of_rows([block.start for block in blocks]).unsqueeze(1)
        if kept:
            assert past is not None
            if self.waiting or kept != [*range(entered)]:
                parts = [*self.waiting, (self.at_work, past, self.stale, self.width)]
                numbers, caches, stale, widths = zip(*parts, strict=True)
                order = torch.cat(numbers).argsort()[self.in_branches(kept, entered)]
                past, self.stale, self.width = join_rows([*caches], order), torch.cat(stale)[order], max(widths)
            if width := blocks[0].origin - self.origins[kept[0]]:  # of padding before what is stored; negative: removed
                for layer in layers_of(past):
                    layer.keys, layer.values = (pad(of, (0, 0, width, 0)) for of in (layer.keys, layer.values))
                self.stale = pad(self.stale, (width, 0))
            self.past = past
        self.opening, self.old, self.waiting = True, len(kept), []
        self.origins = [block.origin for block in blocks]

    def keep(self, rows: Tensor) -> None:
        assert self.past is not None
        if self.lasts:
            kept = torch.zeros_like(self.at_work, dtype=torch.bool).index_fill_(0, rows, True)
            full = kept.byte().argsort(stable=True)[: len(kept) - len(rows)]
            self.waiting.append((self.at_work[full], select_rows(self.past, full), self.stale[full], self.width))
        self.past, self.stale, self.at_work = select_rows(self.past, rows), self.stale[rows], self.at_work[rows]
        self.start, self.end = self.start[rows], self.end[rows]

    def states(self, ids: Tensor, visible: Tensor, positions: Tensor) -> tuple[Tensor, Tensor]:
        # Rows with fewer hidden tokens than others are padded with positions that are not hidden.
        hidden = (ids.gather(1, positions) == self.mask_token_id) & (positions >= self.start) & (positions < self.end)
        now = torch.zeros_like(ids, dtype=torch.bool).scatter(1, positions, hidden)

        def feed(group: range, rows: Any) -> tuple[DynamicCache, Tensor, Tensor, Tensor]:
            if group[0] >= old:
                past = DynamicCache()
                states = self.feed_all(ids[rows], visible[rows], positions[rows], past)
                return past, now[rows], states, visible[rows].sum(-1)
            assert self.past is not None
            fed = self.stale | now[rows]  # hidden in the last pass or in this one
            width = self.width + positions.shape[1] * self.opening
            anew = fed.logical_not().byte().argsort(dim=1, stable=True)[:, :width]
            given = ids[rows], visible[rows], positions[rows]
            states = self.feed(self.past, *given, anew, fed.gather(1, anew))
            # Where logits predict the next token, the tokens before the hidden ones are processed, too.
            return self.past, now[rows], states, fed.sum(-1) + hidden[rows].sum(-1) * self.shift

        count = len(ids) // self.branches
        old = self.old if self.opening else count
        if self.opening:
            self.at_work = torch.arange(len(ids), device=ids.device)
        self.past, self.stale, states, fed = self.feed_apart(old, count, feed)
        self.width, self.opening = positions.shape[1], False
        return states, fed

    def feed(
        self, past: DynamicCache, ids: Tensor, visible: Tensor, positions: Tensor, anew: Tensor, fed: Tensor
    ) -> Tensor:
        """The states at `positions` from a pass over those of `anew` (rows, n) that are `fed`; the cache then holds
        their new keys and values."""
        # Keys: those stored of tokens that are not processed again, then the new ones.
        stored = visible.scatter(1, anew, visible.gather(1, anew) * ~fed)
        number = torch.arange(anew.shape[1], device=ids.device).expand_as(anew)
        queries, keys, options = anew, [stored, fed.long()], {}
        at = torch.zeros_like(ids).scatter(1, anew, number).gather(1, positions)
        if self.shift:  # predictions are made from the tokens before the hidden ones: these are queries, too
            before = (positions - 1).clamp(min=0)
            before = torch.where(visible.gather(1, before).bool(), before, positions)
            queries = torch.cat([anew, before], dim=1)
            keys.append(torch.zeros_like(before))  # hidden as keys: other tokens see them at their own positions
            options["token_before"] = torch.arange(queries.shape[1], device=ids.device).expand_as(queries)
            at = anew.shape[1] + torch.arange(positions.shape[1], device=ids.device).expand_as(positions)
        states = self.backbone(
            ids.gather(1, queries),
            self.mask(torch.cat(keys, dim=1), queries.shape[1]),
            at,
            position_ids=count_positions(visible).gather(1, queries),
            **{CACHE: past},
            **options,
        )
        # The pass appended its keys and values: move those of the `fed` tokens to their own positions.
        length, at, fresh = ids.shape[1], anew[:, None, :, None], fed[:, None, :, None]
        for layer in layers_of(past):
            for name in ("keys", "values"):
                old, new = getattr(layer, name).split([length, getattr(layer, name).shape[2] - length], dim=2)
                new = torch.where(fresh, new[:, :, : anew.shape[1]], old.take_along_dim(at, 2))
                setattr(layer, name, old.scatter(2, at.expand_as(new), new))
        return states
