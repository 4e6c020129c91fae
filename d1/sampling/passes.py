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
class KVCacheRows:
    """The keys and values of the first tokens of a row's text, for a later text that begins with the same tokens.

    The exact caches of models with blocks read them when a row begins, and store theirs when it ends: those of the
    prompt and the finished blocks. Other passes store nothing.

    Attributes:
        layers: keys and values (heads, tokens, size) of each layer.
        wanted: whether anything reads what a row would store.
    """

    layers: list[tuple[Tensor, Tensor]] = field(default_factory=list)
    wanted: bool = True

    @property
    def tokens(self) -> int:
        if not self.layers:
            return 0
        keys, _ = self.layers[0]
        return keys.shape[1]

    def crop(self, tokens: int) -> None:
        """Drops all but those of the first `tokens`."""
        self.layers = [(keys[:, :tokens], values[:, :tokens]) for keys, values in self.layers]

    def clear(self) -> None:
        self.layers = []


class Block(NamedTuple):
    """The positions of the text, prompt included, where a row fills its block: from `start` up to but not including
    `end`."""

    start: int
    end: int
    origin: int  # the first position that is processed; those before it are padding
    boundary: int  # a position where a block of a block-causal model begins
    causal: bool = False  # with a causal context: the first pass predicts the first token from the text before it
    cache_rows: KVCacheRows | None = None  # of the row, counted from its origin


class Passes:
    """Passes that process the whole text, and the base class of the caches. Tensors hold the rows of all branches.

    Args:
        branches: 2 with guidance, otherwise 1.
        mask_token_id: the token at hidden positions.
        needs_attention_mask: whether some position is invisible or, in a cache, may be.
        aligned: whether all rows fill the same positions.
    """

    def __init__(
        self, model: Any, *, branches: int, mask_token_id: int, device: Any, needs_attention_mask: bool, aligned: bool
    ) -> None:
        self.backbone = forward_pass(model)
        self.branches, self.mask_token_id, self.device = branches, mask_token_id, device
        self.needs_attention_mask, self.aligned = needs_attention_mask, aligned
        self.over_queries = takes_masks_over_queries(model.config)
        # Where logits predict the next token, the state for a position is that of the token before it.
        self.shift = int(getattr(model.config, "predicts_next_token", False))

    def begin_blocks(self, blocks: list[Block], kept: list[int]) -> None:
        """Begin new blocks: the next pass is the first of these blocks, one per row. The first rows continue from
        the last block, where their numbers were `kept`; the rows after them are new."""

    def gather_cache_rows(self, rows: Tensor) -> None:
        """Continue, until the next block, with only these rows of the last pass."""

    def evict(self, row: int, cache_rows: KVCacheRows) -> None:
        """Move the cached keys and values of a row that ends to `cache_rows`; `row` is its number among those that
        began the last block."""

    def states(self, ids: Tensor, visible: Tensor, positions: Tensor) -> tuple[Tensor, Tensor]:
        """Aligned last hidden states (rows, n, hidden) at `positions` (rows, n), which lie in the rows' blocks, and
        (rows,) how many real tokens of each row were processed; `ids` and `visible` are (rows, length)."""
        return self.forward_all(ids, visible, positions), visible.sum(-1)

    def forward_all(self, ids: Tensor, visible: Tensor, positions: Tensor, past: DynamicCache | None = None) -> Tensor:
        """The states at `positions` from a pass over the whole text, whose keys and values go to `past`."""
        options: dict[str, Any] = {}
        if past is not None:
            options[CACHE] = past
        if self.needs_attention_mask and self.over_queries:
            options["position_ids"] = count_positions(visible)
        return self.backbone(ids, self.mask(visible, ids.shape[1]), positions, **options)

    def forward_groups(
        self, old: int, count: int, forward_group: Callable[[range, Any], tuple[DynamicCache, Tensor, Tensor, Tensor]]
    ) -> tuple[DynamicCache, Tensor, Tensor, Tensor]:
        """Run one pass for the first `old` of `count` rows, which have a cache, and one for the others, which do not.

        `forward_group` gets the numbers of the rows within a branch, and the index of these rows in all branches. It
        returns their cache, a tensor (rows, keys) about its keys, and the two results of `states`, as this does for all
        rows.
        """
        if old == count or old == 0:
            return forward_group(range(count), slice(None))
        old_rows = self.in_branches(list(range(old)), count)
        new_rows = self.in_branches(list(range(old, count)), count)
        old_past, old_keys, old_states, old_computed = forward_group(range(old), old_rows)
        new_past, new_keys, new_states, new_computed = forward_group(range(old, count), new_rows)

        # All rows in their order; what is said about keys is padded on the left, as the cache is.
        order = torch.cat([old_rows, new_rows]).argsort()
        past = join_rows([old_past, new_past], order)
        width = max(old_keys.shape[1], new_keys.shape[1])
        old_keys = pad(old_keys, (width - old_keys.shape[1], 0))
        new_keys = pad(new_keys, (width - new_keys.shape[1], 0))
        about_keys = torch.cat([old_keys, new_keys])[order]
        states = torch.cat([old_states, new_states])[order]
        computed = torch.cat([old_computed, new_computed])[order]
        return past, about_keys, states, computed

    def mask(self, visible: Tensor, queries: int) -> Tensor | None:
        """The attention mask for `queries` queries that see the keys `visible` (rows, keys)."""
        if not self.needs_attention_mask:
            return None
        if self.over_queries:
            return over_queries(visible, queries)
        return visible

    def per_row(self, numbers: list[int]) -> Tensor:
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
    positions: Tensor  # (rows, n) of the text, consecutive; where `computed` is 0 they may lie outside it
    computed: Tensor  # (rows, n) 1 at the positions that are processed for the row
    position_ids: Tensor  # (rows, n)
    starts: Tensor | None = None  # (rows, 1) with a causal context, the first position of the opened block

    @classmethod
    def create(
        cls, past: DynamicCache, stored: Tensor, visible: Tensor, first: Tensor, end: Tensor, width: int
    ) -> Window:
        """The window of `width` positions from `first` (rows,). Only positions before `end` (rows,) are processed."""
        positions = first.unsqueeze(1) + torch.arange(width, device=first.device)
        inside = positions.clamp(0, visible.shape[1] - 1)
        computed = visible.gather(1, inside) * (positions < end.unsqueeze(1))
        return cls(
            past=past,
            stored=stored,
            positions=positions,
            computed=computed,
            position_ids=count_positions(visible).gather(1, inside),
        )

    def select_rows(self, rows: Tensor) -> Window:
        return Window(
            past=select_rows(self.past, rows),
            stored=self.stored[rows],
            positions=self.positions[rows],
            computed=self.computed[rows],
            position_ids=self.position_ids[rows],
            starts=None if self.starts is None else self.starts[rows],
        )


class WindowPasses(Passes):
    """A first pass for each block, which makes the window, and later passes over that window."""

    window: Window | None

    def begin_blocks(self, blocks: list[Block], kept: list[int]) -> None:
        self.blocks, self.kept, self.window = blocks, kept, None

    def gather_cache_rows(self, rows: Tensor) -> None:
        assert self.window is not None
        self.window = self.window.select_rows(rows)

    def states(self, ids: Tensor, visible: Tensor, positions: Tensor) -> tuple[Tensor, Tensor]:
        if self.window is None:
            self.window, states, computed = self.first_pass(ids, visible, positions)
            return states, computed
        # The window's own keys and values change in the next pass, so none of them is kept.
        reading = replace(self.window, past=read_only(self.window.past))
        return self.forward_window(reading, ids, positions), self.window.computed.sum(-1)

    def first_pass(self, ids: Tensor, visible: Tensor, positions: Tensor) -> tuple[Window, Tensor, Tensor]:
        """The window of the later passes, and the two results of `states` for this pass."""
        raise NotImplementedError

    def forward_window(self, window: Window, ids: Tensor, positions: Tensor) -> Tensor:
        """The states at `positions` from a pass over the window, whose keys and values go to its cache."""
        inside, width = window.positions, window.positions.shape[1]
        options: dict[str, Any] = {CACHE: window.past}
        if window.starts is not None:
            options["opened"] = torch.cat([torch.zeros_like(window.stored), inside >= window.starts], dim=1).bool()
        return self.backbone(
            ids.gather(1, inside.clamp(0, ids.shape[1] - 1)),
            self.mask(torch.cat([window.stored, window.computed], dim=1), width),
            (positions - inside[:, :1]).clamp(0, width - 1),
            position_ids=window.position_ids,
            **options,
        )


class Windows(WindowPasses):
    """The caches "prefix" (`to_end`) and "dual"."""

    def __init__(self, model: Any, *, to_end: bool, **options: Any) -> None:
        super().__init__(model, **options)
        self.to_end = to_end
        self.needs_attention_mask = self.needs_attention_mask or not self.aligned

    def first_pass(self, ids: Tensor, visible: Tensor, positions: Tensor) -> tuple[Window, Tensor, Tensor]:
        past, length = DynamicCache(), ids.shape[1]
        states = self.forward_all(ids, visible, positions, past)

        # The window of each row.
        firsts = [max(0, block.start - self.shift) for block in self.blocks]
        ends = [min(block.end, length) for block in self.blocks]
        if self.to_end:
            ends = [length] * len(self.blocks)
        first, end = self.per_row(firsts), self.per_row(ends)

        # The window's keys are removed from the cache if all rows have the same window, and hidden if they differ.
        if self.aligned:
            stored = remove_range(visible, 1, firsts[0], ends[0])
            for layer in layers_of(past):
                layer.keys = remove_range(layer.keys, 2, firsts[0], ends[0])
                layer.values = remove_range(layer.values, 2, firsts[0], ends[0])
        else:
            everywhere = torch.arange(length, device=ids.device)
            stored = visible.masked_fill((everywhere >= first.unsqueeze(1)) & (everywhere < end.unsqueeze(1)), 0)
        window = Window.create(past, stored, visible, first, end, max(map(sub, ends, firsts)))
        return window, states, visible.sum(-1)


def remove_range(values: Tensor, dim: int, first: int, end: int) -> Tensor:
    """`values` without the entries from `first` up to `end` of a dimension."""
    return torch.cat([values.narrow(dim, 0, first), values.narrow(dim, end, values.shape[dim] - end)], dim=dim)


class FinishedBlocks(WindowPasses):
    """The exact cache of a block-causal model's finished blocks.

    A pass processes those blocks of the model that the filled block touches. The first of these passes also processes
    what is not stored yet: the previous block, which is complete only now, or the prompt of a new row.
    """

    finished: DynamicCache  # of all rows that began the block; the window's cache has only those still at work on it
    seen: Tensor  # (rows, keys) of `finished`, 1 at tokens
    opened: Tensor  # (rows, 1, hidden), the state that predicted the block's first hidden token in the first pass

    def __init__(self, model: Any, **options: Any) -> None:
        super().__init__(model, **options)
        self.needs_attention_mask, self.size = True, model.config.block_size
        self.stored: list[int] = []  # how many positions of each row are in `finished`, from its origin

    def gather_cache_rows(self, rows: Tensor) -> None:
        super().gather_cache_rows(rows)
        self.opened = self.opened[rows]

    def states(self, ids: Tensor, visible: Tensor, positions: Tensor) -> tuple[Tensor, Tensor]:
        window = self.window
        states, computed = super().states(ids, visible, positions)
        if window is None:
            self.opened = states[:, :1]
        elif self.shift:
            # A block's first token is predicted from the token before it, which only the first pass processed.
            alone = (positions == window.positions[:, :1]) & window.stored.any(1, keepdim=True)
            states = torch.where(alone.unsqueeze(-1), self.opened, states)
        return states, computed

    def first_pass(self, ids: Tensor, visible: Tensor, positions: Tensor) -> tuple[Window, Tensor, Tensor]:
        count, old = len(self.blocks), len(self.kept)

        # Of each row: the window of the later passes, where this pass ends, and how many tokens are stored already.
        firsts, ends, pass_ends, stored = list[int](), list[int](), list[int](), list[int]()
        for number, block in enumerate(self.blocks):
            first, end = self.processed(block, ids.shape[1])
            firsts.append(first)
            ends.append(end)
            # Blocks whose first token is predicted from the clean text take no part in this pass.
            pass_ends.append(first if block.causal else end)
            if number < old:
                stored.append(self.stored[self.kept[number]])
            else:
                stored.append(self.readable_tokens(block))
        stored_until = [block.origin + tokens for block, tokens in zip(self.blocks, stored, strict=True)]
        ahead = max(map(sub, pass_ends, firsts))  # positions of this pass in the window

        # The same on the device, (rows,).
        window_first, window_end = self.per_row(firsts), self.per_row(ends)
        pass_first, pass_end = self.per_row(stored_until), self.per_row(pass_ends)
        # The first token of a block that takes no part is predicted from the token before it.
        positions = positions - (window_first == pass_end).long().unsqueeze(1)

        def forward_group(group: range, rows: Any) -> tuple[DynamicCache, Tensor, Tensor, Tensor]:
            if group[0] < old:
                past, seen = self.kept_blocks()
            else:
                past, seen = self.read_blocks(stored[old:])
            # One window for all rows of the group: it starts with the `more` positions that are not stored yet.
            more = max(firsts[row] - stored_until[row] for row in group)
            window = Window.create(
                past, seen, visible[rows], window_first[rows] - more, pass_end[rows], width=more + ahead
            )
            window.computed *= window.positions >= pass_first[rows].unsqueeze(1)
            window.starts = self.block_starts(window_first[rows])
            states = self.forward_window(window, ids[rows], positions[rows])
            if ahead:
                past.crop(-ahead)
            seen = torch.cat([seen, window.computed[:, :more]], dim=1)
            return past, seen, states, window.computed.sum(-1)

        self.finished, self.seen, states, computed = self.forward_groups(old, count, forward_group)
        self.stored = [first - block.origin for first, block in zip(firsts, self.blocks, strict=True)]

        # The window of the later passes.
        width = max(map(sub, ends, firsts))
        window = Window.create(self.finished, self.seen, visible, window_first, window_end, width)
        window.starts = self.block_starts(window_first)
        return window, states, computed

    def readable_tokens(self, block: Block) -> int:
        """How many tokens a new row reads: whole blocks, without the last token, which may predict the next one."""
        if block.cache_rows is None:
            return 0
        tokens = min(block.cache_rows.tokens, block.start - block.origin - 1)
        return max(tokens - tokens % self.size, 0)

    def read_blocks(self, counts: list[int]) -> tuple[DynamicCache, Tensor]:
        """A cache of the first `counts` tokens of the new rows, and (rows, keys) 1 at these tokens. The rows keep
        nothing of theirs."""
        past, longest = DynamicCache(), max(counts)

        # The rows that have something to read.
        readers = []
        for row, block in enumerate(self.blocks[len(self.kept) :]):
            if block.cache_rows is not None and counts[row]:
                readers.append((row, block.cache_rows.layers))

        # Layer by layer: their keys and values, on the right of the new cache.
        first_layers = readers[0][1] if readers else []
        for number, (some_keys, some_values) in enumerate(first_layers):
            heads, _, size = some_keys.shape
            keys = some_keys.new_zeros(len(counts), heads, longest, size)
            heads, _, size = some_values.shape
            values = some_values.new_zeros(len(counts), heads, longest, size)
            for row, layers in readers:
                row_keys, row_values = layers[number]
                keys[row, :, longest - counts[row] :] = row_keys[:, : counts[row]]
                values[row, :, longest - counts[row] :] = row_values[:, : counts[row]]
            past.update(keys, values, number)
        for block in self.blocks[len(self.kept) :]:
            if block.cache_rows is not None:
                block.cache_rows.clear()
        tokens = torch.arange(longest, 0, -1, device=self.device) <= self.per_row(counts).unsqueeze(1)
        return past, tokens.long()

    def evict(self, row: int, cache_rows: KVCacheRows) -> None:
        tokens = self.stored[row]
        cache_rows.clear()
        if tokens and self.branches == 1:  # without a prompt, as in guidance, the text is another one in each turn
            at = self.seen[row].argsort(stable=True)[-tokens:]  # tokens last, in their order
            for layer in layers_of(self.finished):
                cache_rows.layers.append((layer.keys[row][:, at], layer.values[row][:, at]))

    def processed(self, block: Block, length: int) -> tuple[int, int]:
        """The first position of the model's blocks that a block touches, and the position after them."""
        first = block.start - (block.start - block.boundary) % self.size
        return first, min(block.end + (block.boundary - block.end) % self.size, length)

    def block_starts(self, first: Tensor) -> Tensor | None:
        """`Window.starts` for the `first` positions (rows,) of blocks."""
        return None

    def kept_blocks(self) -> tuple[DynamicCache, Tensor]:
        """The cache of the `kept` rows without padding, and (rows, keys) 1 at its tokens."""
        past, seen, count = self.finished, self.seen, len(self.stored)
        if self.kept != [*range(count)]:
            rows = self.in_branches(self.kept, count)
            past = select_rows(past, rows)
            seen = seen[rows]
        longest = max(self.stored[row] for row in self.kept)
        if not longest:
            return DynamicCache(), seen[:, :0]
        if all(self.stored[row] == seen.shape[1] for row in self.kept):
            return past, seen
        order = seen.argsort(dim=1, stable=True)[:, -longest:]  # tokens last, in their order
        at = order[:, None, :, None]
        past = same_layers(past)
        for layer in layers_of(past):
            layer.keys = layer.keys.take_along_dim(at, dim=2)
            layer.values = layer.values.take_along_dim(at, dim=2)
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

    def block_starts(self, first: Tensor) -> Tensor | None:
        return first.unsqueeze(1)


class RecomputedContext(Passes):
    """The same passes over the whole text: the clean text before each row's block, and the block."""

    def begin_blocks(self, blocks: list[Block], kept: list[int]) -> None:
        self.start = self.per_row([block.start for block in blocks])
        self.end = self.per_row([block.end for block in blocks])
        self.causal = self.per_row([int(block.causal) for block in blocks])  # only in the first pass of the block

    def gather_cache_rows(self, rows: Tensor) -> None:
        self.start, self.end, self.causal = self.start[rows], self.end[rows], self.causal[rows]

    def states(self, ids: Tensor, visible: Tensor, positions: Tensor) -> tuple[Tensor, Tensor]:
        start, end, causal = self.start.unsqueeze(1), self.end.unsqueeze(1), self.causal.unsqueeze(1)
        everywhere = torch.arange(ids.shape[1], device=ids.device)
        opened = (everywhere >= start) & (everywhere < end) & (causal == 0)
        self.causal = torch.zeros_like(self.causal)
        states = self.backbone(ids, self.mask(visible, ids.shape[1]), positions - causal, opened=opened)
        return states, visible.sum(-1)


# --- Delayed: passes that process only the tokens that have changed ---------------------------------------------------
#
# delayed  the first pass of each block processes all tokens; a later pass processes the tokens of the block that were
#          still hidden in the pass before it: a token is processed once more after it was revealed, and then cached
#          (dKV-Cache, arXiv 2505.15781, section 3.2; its release also processes the masks of later blocks)
# lasting  the same, but the cache is kept from block to block: only a row's very first pass processes all tokens


class DelayedPasses(Passes):
    """The caches "delayed" and "lasting". With `lasts`, rows whose block is full wait and keep their cache."""

    past: DynamicCache | None = None
    start: Tensor  # (rows, 1), the first position of the row's block
    end: Tensor  # (rows, 1), the position after it
    stale: Tensor  # bool (rows, length), what was hidden in each row's last pass; the next pass processes it
    at_work: Tensor  # (rows,) which of the rows that began the block still work on it

    def __init__(self, model: Any, *, lasts: bool, **options: Any) -> None:
        super().__init__(model, **options)
        self.lasts, self.needs_attention_mask = lasts, True
        self.origins: list[int] = []  # of the rows that began the block
        self.width = 0  # upper limit of the stale positions per row at work
        self.waiting: list[tuple[Tensor, DynamicCache, Tensor, int]] = []  # at_work, past, stale, width of waiting rows

    def begin_blocks(self, blocks: list[Block], kept: list[int]) -> None:
        if not self.lasts:
            kept = []
        past, self.past = self.past, None
        if kept:
            assert past is not None
            self.past = self.kept_rows(past, kept)
            padding = blocks[0].origin - self.origins[kept[0]]  # before what is stored; negative: it is removed
            if padding:
                for layer in layers_of(self.past):
                    layer.keys = pad(layer.keys, (0, 0, padding, 0))
                    layer.values = pad(layer.values, (0, 0, padding, 0))
                self.stale = pad(self.stale, (padding, 0))
        self.opening, self.old, self.waiting = True, len(kept), []
        self.origins = [block.origin for block in blocks]
        self.start = self.per_row([block.start for block in blocks]).unsqueeze(1)
        self.end = self.per_row([block.end for block in blocks]).unsqueeze(1)

    def kept_rows(self, past: DynamicCache, kept: list[int]) -> DynamicCache:
        """The cache of the `kept` rows, those at work and those that wait; `stale` and `width` become theirs."""
        count = len(self.origins)
        if not self.waiting and kept == list(range(count)):
            return past
        parts = [*self.waiting, (self.at_work, past, self.stale, self.width)]
        numbers, caches, stale, widths = zip(*parts, strict=True)
        order = torch.cat(numbers).argsort()[self.in_branches(kept, count)]
        self.stale, self.width = torch.cat(stale)[order], max(widths)
        return join_rows(list(caches), order)

    def gather_cache_rows(self, rows: Tensor) -> None:
        assert self.past is not None
        if self.lasts:
            is_working = torch.zeros_like(self.at_work, dtype=torch.bool).index_fill_(0, rows, True)
            full = is_working.byte().argsort(stable=True)[: len(is_working) - len(rows)]
            self.waiting.append((self.at_work[full], select_rows(self.past, full), self.stale[full], self.width))
        self.past = select_rows(self.past, rows)
        self.stale, self.at_work = self.stale[rows], self.at_work[rows]
        self.start, self.end = self.start[rows], self.end[rows]

    def states(self, ids: Tensor, visible: Tensor, positions: Tensor) -> tuple[Tensor, Tensor]:
        # Rows with fewer hidden tokens than others are padded with positions that are not hidden.
        hidden = (ids.gather(1, positions) == self.mask_token_id) & (positions >= self.start) & (positions < self.end)
        now = torch.zeros_like(ids, dtype=torch.bool).scatter(1, positions, hidden)

        def forward_group(group: range, rows: Any) -> tuple[DynamicCache, Tensor, Tensor, Tensor]:
            # Rows without a cache
            if group[0] >= old:
                past = DynamicCache()
                states = self.forward_all(ids[rows], visible[rows], positions[rows], past)
                return past, now[rows], states, visible[rows].sum(-1)

            # Rows with a cache: of their tokens, those that were hidden in the last pass or are hidden in this one
            assert self.past is not None
            computed = self.stale | now[rows]
            width = self.width
            if self.opening:
                width += positions.shape[1]
            anew = computed.logical_not().byte().argsort(dim=1, stable=True)[:, :width]
            states = self.forward_changed(
                self.past, ids[rows], visible[rows], positions[rows], anew, computed.gather(1, anew)
            )
            # Where logits predict the next token, the tokens before the hidden ones are processed, too.
            return self.past, now[rows], states, computed.sum(-1) + hidden[rows].sum(-1) * self.shift

        count = len(ids) // self.branches
        old = self.old if self.opening else count
        if self.opening:
            self.at_work = torch.arange(len(ids), device=ids.device)
        self.past, self.stale, states, computed = self.forward_groups(old, count, forward_group)
        self.width, self.opening = positions.shape[1], False
        return states, computed

    def forward_changed(
        self, past: DynamicCache, ids: Tensor, visible: Tensor, positions: Tensor, anew: Tensor, computed: Tensor
    ) -> Tensor:
        """The states at `positions` from a pass over those of `anew` (rows, n) that are `computed`; the cache then
        holds their new keys and values."""
        # Keys: those stored of tokens that are not processed again, then the new ones.
        stored = visible.scatter(1, anew, visible.gather(1, anew) * ~computed)
        number = torch.arange(anew.shape[1], device=ids.device).expand_as(anew)
        queries, keys = anew, [stored, computed.long()]
        options: dict[str, Any] = {CACHE: past}
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
            **options,
        )

        # The pass appended its keys and values: move those of the `computed` tokens to their own positions.
        length, token_at, is_computed = ids.shape[1], anew[:, None, :, None], computed[:, None, :, None]

        def moved(values: Tensor) -> Tensor:
            old, new = values[:, :, :length], values[:, :, length : length + anew.shape[1]]
            new = torch.where(is_computed, new, old.take_along_dim(token_at, 2))
            return old.scatter(2, token_at.expand_as(new), new)

        for layer in layers_of(past):
            layer.keys, layer.values = moved(layer.keys), moved(layer.values)
        return states
