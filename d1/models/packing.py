"""Rows of several streams: packed texts, and a clean text with noised copies of its blocks.

Packed rows hold texts without padding between them, each of which attends only to itself. A prepared model without its
head takes the ids (1, tokens) of such a row together with its `segments`: for each text, the number of its tokens, and
how many of its last tokens follow again as noised copies. Flash attention reads where texts end; sdpa and eager run on
one text after the other, so a packed row costs as much as its texts alone.

With two streams, all blocks of a block-causal model are noised at once: the noised tokens follow the whole clean text.
Each of them sees the noised tokens of its own block and the clean text of earlier blocks (BD3-LM, arXiv 2503.09573,
section 3.2; the mask is `Attention.mask`).
"""

from __future__ import annotations

import itertools
import sys
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor
from transformers import AttentionInterface, AttentionMaskInterface, PreTrainedModel

from d1.models.attention import (
    Blocks,
    attention_of,
    before_in_context,
    before_in_two_streams,
    count_positions,
    given_tokens,
    position_ids,
    require_prepared,
    with_copies,
)
from d1.models.head import backbone_and_head, unwrapped
from d1.models.kinds import block_size, windowed
from d1.transformers_bridge import PACKED, attention_kernel, eager_mask, sdpa_mask, takes_packed_rows


class Texts(NamedTuple):
    """The texts of a packed row, in the form that its layers take."""

    queries: list[int]  # their number per text; after `narrow`, only those whose states are needed
    keys: list[int]  # their number per text
    masks: list[Tensor | None]  # the mask of each text; None: tokens see all of their text

    def at(self, positions: Tensor) -> Texts:
        """The same texts with only the queries at `positions` (1, n) of the row."""
        # Positions of the row become positions within each text: those before its start are subtracted.
        ends = torch.tensor(self.keys, device=positions.device).cumsum(0)
        text = torch.bucketize(positions[0], ends, right=True)
        queries = text.bincount(minlength=len(self.keys)).tolist()
        inside = (positions[0] - (ends - ends.diff(prepend=ends.new_zeros(1)))[text]).split(queries)
        masks = zip(self.masks, inside, strict=True)
        return Texts(queries, self.keys, [None if mask is None else mask[:, :, own] for mask, own in masks])


def take_packed_rows(model: Any) -> None:
    """Let a prepared model (or an adapter on one) take packed rows, with their `segments`; nothing else changes.
    ValueError if the model's kernel cannot keep texts apart."""
    require_prepared(model)
    inner = unwrapped(model)
    kernel = attention_kernel(inner.config)
    if kernel in ("sdpa", "eager"):
        inner.set_attn_implementation(PACKED + kernel)
    check_packed(inner.config, type(inner).__name__)


def check_packed(config: Any, name: str) -> None:
    """Raise ValueError if the attention of this config would ignore where the texts of a row end."""
    kernel = attention_kernel(config) or ""
    if windowed(config) or not (takes_packed_rows(config) or kernel.startswith("flash_attention")):
        raise ValueError(
            f"{name}: rows of several texts need layers without windows, and flash attention or, after "
            f"d1.models.packing.take_packed_rows(model), sdpa or eager: not {kernel}"
        )


def place_packed(backbone: PreTrainedModel, args: tuple, kwargs: dict[str, Any]) -> tuple[tuple, dict[str, Any]]:
    """Forward pre-hook, before `attend`: makes, from `segments`, the positions and what keeps the texts apart."""
    segments = kwargs.pop("segments", None)
    if segments is None:
        return args, kwargs
    config, device = backbone.config, given_tokens(args, kwargs).device
    check_packed(config, type(backbone).__name__)
    attention, counts = attention_of(config), [length + noised for length, noised in segments]
    blocks = kwargs.pop("blocks", None) or [None] * len(counts)
    texts = [(torch.ones(1, length, dtype=torch.long, device=device), noised) for length, noised in segments]
    positions = [with_copies(count_positions(visible), noised) for visible, noised in texts]
    kwargs["position_ids"] = position_ids(config, torch.cat(positions, dim=1))
    if getattr(config, "predicts_next_token", False):
        starts, size = itertools.accumulate(counts, initial=0), block_size(config)
        if attention.causal_context:
            made = zip(texts, counts, blocks, strict=True)
            before = [before_in_context(config, *text, count, own) for text, count, own in made]
        else:
            own_blocks = None if size is None else Blocks(size)
            before = [before_in_two_streams(*text, own_blocks) for text in texts]
        kwargs["token_before"] = torch.cat([start + own for start, own in zip(starts, before, strict=False)], dim=1)
    if takes_packed_rows(config):
        made = zip(texts, counts, blocks, strict=True)
        masks: list[Tensor | None] = [None] * len(counts)
        if attention.sees is not None:
            masks = [attention.mask_for(backbone, *text, count, blocks=own) for text, count, own in made]
        kwargs["texts"] = Texts(counts, counts, masks)
    else:
        ends = torch.tensor([0, *counts], device=device).cumsum(0).int()
        kwargs |= dict.fromkeys(("cu_seq_lens_q", "cu_seq_lens_k"), ends)
        kwargs |= dict.fromkeys(("max_length_q", "max_length_k"), max(counts))
    return args, kwargs


def text_by_text(name: str) -> Callable[..., tuple[Tensor, Any]]:
    """The kernel `name` for packed rows, with the arguments of Transformers: (rows, heads, tokens, size) each."""

    def attend(
        module: Any, query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, texts: Any = None, **kwargs: Any
    ) -> tuple[Tensor, Any]:
        own_eager = sys.modules[type(module).__module__]  # each model has an eager attention of its own
        kernel: Any = own_eager.eager_attention_forward if name == "eager" else AttentionInterface()[name]
        if texts is None:
            return kernel(module, query, key, value, mask, **kwargs)
        keys, values = key.split(texts.keys, dim=2), value.split(texts.keys, dim=2)
        parts = zip(query.split(texts.queries, dim=2), keys, values, texts.masks, strict=True)
        return torch.cat([kernel(module, *part, **kwargs)[0] for part in parts if part[0].shape[2]], dim=1), None

    return attend


def two_stream_states(
    model: Any,
    clean: Tensor,
    noised: Tensor,
    visible: Tensor | None,
    *,
    blocks: Blocks | None = None,
    clean_at: Tensor | None = None,
) -> Tensor:
    """States (rows, n, hidden) of each noised token, aligned to the token that each one scores.

    Args:
        model: a prepared model with blocks.
        clean: (rows, length) ids; `visible`, of this shape, is 0 at padding, or None if there is none.
        noised: (rows, n) ids of the last n tokens, some of them hidden. The states of a block that begins before these
            tokens are useless.
        blocks: where blocks lie, if not where the model counts them: `Attention.causal_context` allows any.
        clean_at: (rows, m) clean tokens whose states come first: (rows, m + n, hidden) are returned.
    """
    length, count = clean.shape[1], noised.shape[1]
    own = torch.arange(length, length + count, device=clean.device).expand(len(clean), -1)
    asked = own if clean_at is None else torch.cat([clean_at, own], dim=1)
    where = {} if blocks is None else {"blocks": blocks}
    return backbone_and_head(model)[0](torch.cat([clean, noised], dim=1), visible, asked, noised=count, **where)


def packed_two_stream_states(
    model: Any,
    clean: Tensor,
    noised: Tensor,
    lengths: Sequence[int],
    hidden: Tensor,
    *,
    blocks: Sequence[Blocks] | None = None,
    clean_at: Tensor | None = None,
) -> Tensor:
    """`two_stream_states` of the hidden tokens of a packed row: (hidden tokens, hidden size), in the order of the row.

    Each text is followed by its noised copy, which begins with the first block that has hidden tokens.

    Args:
        model: a prepared model with blocks that takes packed rows (`packing.py`).
        clean, noised: (1, tokens) ids of texts with `lengths` tokens.
        hidden: (1, tokens) bool; if it is on the CPU, nothing waits for the device.
        blocks: those of each text, as for `two_stream_states`.
        clean_at: (1, tokens) bool, clean tokens whose states come before the others.
    """
    own = blocks or [Blocks(model.config.block_size)] * len(lengths)
    asked_clean = torch.zeros_like(hidden) if clean_at is None else clean_at
    ids, segments, asked, of_clean = [], [], list[Tensor](), list[Tensor]()
    of_texts = (values[0].split(list(lengths)) for values in (clean, noised, hidden, asked_clean))
    for text, copy, mask, chosen, (size, origin) in zip(*of_texts, own, strict=True):
        first = int(mask.int().argmax()) if mask.any() else len(text)
        first -= min(first, (first - int(origin)) % size) if mask.any() else 0
        ids += [text, copy[first:]]
        asked += [torch.zeros_like(mask), mask[first:]]
        of_clean += [chosen, torch.zeros_like(mask[first:])]
        segments.append((len(text), len(text) - first))
    # The layers take the tokens in the order of the row; `order` puts the clean ones first again.
    at, order = torch.cat([torch.cat(of).nonzero().squeeze(1) for of in (of_clean, asked)]).sort()
    where = {} if blocks is None else {"blocks": blocks}
    at = at.unsqueeze(0).to(clean.device, non_blocking=True)
    states = backbone_and_head(model)[0](torch.cat(ids).unsqueeze(0), None, at, segments=segments, **where)[0]
    return states if clean_at is None else states[order.argsort().to(clean.device, non_blocking=True)]


for kernel_name, make_mask in (("sdpa", sdpa_mask), ("eager", eager_mask)):
    AttentionInterface.register(PACKED + kernel_name, text_by_text(kernel_name))
    AttentionMaskInterface.register(PACKED + kernel_name, make_mask)
