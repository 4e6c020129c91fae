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
    input_tokens,
    position_ids,
    require_prepared,
    with_copies,
)
from d1.models.head import backbone_and_head, unwrapped
from d1.models.kinds import block_size, windowed
from d1.transformers_bridge import PACKED, attention_kernel, eager_mask, sdpa_mask, takes_packed_rows


class Texts(NamedTuple):
    """The texts of a packed row, in the form that its layers take."""

    queries: list[int]  # their number per text; after `select_state_positions`, only those whose states are needed
    keys: list[int]  # their number per text
    masks: list[Tensor | None]  # the mask of each text; None: tokens see all of their text

    def at(self, positions: Tensor) -> Texts:
        """The same texts with only the queries at `positions` (1, n) of the row."""
        ends = torch.tensor(self.keys, device=positions.device).cumsum(0)
        text = torch.bucketize(positions[0], ends, right=True)
        queries = text.bincount(minlength=len(self.keys)).tolist()
        # Positions of the row become positions within each text: those before its start are subtracted.
        starts = ends - ends.diff(prepend=ends.new_zeros(1))
        inside = (positions[0] - starts[text]).split(queries)
        masks: list[Tensor | None] = []
        for mask, text_positions in zip(self.masks, inside, strict=True):
            masks.append(None if mask is None else mask[:, :, text_positions])
        return Texts(queries, self.keys, masks)


def enable_packed_rows(model: Any) -> None:
    """Let a prepared model (or an adapter on one) take packed rows, with their `segments`; nothing else changes.
    ValueError, before anything has changed, if the model has windows, or its kernel cannot keep texts apart."""
    require_prepared(model)
    inner = unwrapped(model)
    refuse_windows(inner.config, type(inner).__name__)
    kernel = attention_kernel(inner.config)
    if kernel in ("sdpa", "eager"):
        inner.set_attn_implementation(PACKED + kernel)
    check_packed(inner.config, type(inner).__name__)


def refuse_windows(config: Any, name: str) -> None:
    """Raise ValueError if some layers of this config attend only within a window."""
    if windowed(config):
        raise ValueError(
            f"{name}: rows of several texts need layers without windows, and some of its layers attend only within "
            "one: leave --packing out"
        )


def check_packed(config: Any, name: str) -> None:
    """Raise ValueError if the attention of this config would ignore where the texts of a row end."""
    refuse_windows(config, name)
    kernel = attention_kernel(config) or ""
    if not (takes_packed_rows(config) or kernel.startswith("flash_attention")):
        raise ValueError(
            f"{name}: rows of several texts need flash attention or, after "
            f"d1.models.packing.enable_packed_rows(model), sdpa or eager: not {kernel}"
        )


def place_packed(backbone: PreTrainedModel, args: tuple, kwargs: dict[str, Any]) -> tuple[tuple, dict[str, Any]]:
    """Forward pre-hook, before `add_positions_and_mask`: makes, from `segments`, the positions and what keeps the texts
    apart."""
    segments = kwargs.pop("segments", None)
    if segments is None:
        return args, kwargs
    config = backbone.config
    device = input_tokens(args, kwargs).device
    check_packed(config, type(backbone).__name__)
    attention = attention_of(config)
    size = block_size(config)
    runs_text_by_text = takes_packed_rows(config)
    predicts_next_token = getattr(config, "predicts_next_token", False)

    counts: list[int] = []
    positions: list[Tensor] = []
    token_before: list[Tensor] = []
    masks: list[Tensor | None] = []
    blocks = kwargs.pop("blocks", None) or [None] * len(segments)
    for (length, noised), text_blocks in zip(segments, blocks, strict=True):
        count = length + noised
        visible = torch.ones(1, length, dtype=torch.long, device=device)
        positions.append(with_copies(count_positions(visible), noised))
        if predicts_next_token:
            if attention.causal_context:
                before = before_in_context(config, visible, noised, count, blocks=text_blocks)
            else:
                before = before_in_two_streams(visible, noised, None if size is None else Blocks(size))
            token_before.append(sum(counts) + before)  # counted from the start of the row
        if not runs_text_by_text or attention.sees is None:
            masks.append(None)
        else:
            masks.append(attention.kernel_mask(backbone, visible, noised, count, blocks=text_blocks))
        counts.append(count)

    kwargs["position_ids"] = position_ids(config, torch.cat(positions, dim=1))
    if predicts_next_token:
        kwargs["token_before"] = torch.cat(token_before, dim=1)
    if runs_text_by_text:
        kwargs["texts"] = Texts(counts, counts, masks)
    else:  # flash attention
        ends = torch.tensor([0, *counts], device=device).cumsum(0).int()
        kwargs["cu_seq_lens_q"] = ends
        kwargs["cu_seq_lens_k"] = ends
        kwargs["max_length_q"] = max(counts)
        kwargs["max_length_k"] = max(counts)
    return args, kwargs


def text_by_text(name: str) -> Callable[..., tuple[Tensor, Any]]:
    """The kernel `name` for packed rows, with the arguments of Transformers: (rows, heads, tokens, size) each."""

    def attend_within_texts(
        module: Any, query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, texts: Any = None, **kwargs: Any
    ) -> tuple[Tensor, Any]:
        if name == "eager":  # each model has an eager attention of its own
            kernel: Any = sys.modules[type(module).__module__].eager_attention_forward
        else:
            kernel = AttentionInterface()[name]
        if texts is None:
            return kernel(module, query, key, value, mask, **kwargs)
        queries = query.split(texts.queries, dim=2)
        keys = key.split(texts.keys, dim=2)
        values = value.split(texts.keys, dim=2)
        outputs = []
        for text_query, text_key, text_value, text_mask in zip(queries, keys, values, texts.masks, strict=True):
            if text_query.shape[2]:
                outputs.append(kernel(module, text_query, text_key, text_value, text_mask, **kwargs)[0])
        return torch.cat(outputs, dim=1), None

    return attend_within_texts


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
    length = clean.shape[1]
    count = noised.shape[1]
    positions = torch.arange(length, length + count, device=clean.device).expand(len(clean), -1)
    if clean_at is not None:
        positions = torch.cat([clean_at, positions], dim=1)
    backbone, _ = backbone_and_head(model)
    return backbone(torch.cat([clean, noised], dim=1), visible, positions, noised=count, blocks=blocks)


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
    text_blocks = blocks or [Blocks(model.config.block_size)] * len(lengths)
    asked_clean = torch.zeros_like(hidden) if clean_at is None else clean_at
    sizes = list(lengths)
    texts = zip(
        clean[0].split(sizes),
        noised[0].split(sizes),
        hidden[0].split(sizes),
        asked_clean[0].split(sizes),
        text_blocks,
        strict=True,
    )

    # The row: each text, then its copy. The masks choose the states that are returned.
    ids: list[Tensor] = []
    segments: list[tuple[int, int]] = []
    hidden_mask: list[Tensor] = []
    clean_mask: list[Tensor] = []
    for text, copy, text_hidden, text_clean, (size, origin) in texts:
        start = len(text)  # of the copy: the block of the first hidden token
        if text_hidden.any():
            start = int(text_hidden.int().argmax())
            start -= min(start, (start - int(origin)) % size)
        ids += [text, copy[start:]]
        segments.append((len(text), len(text) - start))
        hidden_mask += [torch.zeros_like(text_hidden), text_hidden[start:]]
        clean_mask += [text_clean, torch.zeros_like(text_hidden[start:])]

    # The layers take the tokens in the order of the row; `order` puts the clean ones first again.
    clean_positions = torch.cat(clean_mask).nonzero().squeeze(1)
    hidden_positions = torch.cat(hidden_mask).nonzero().squeeze(1)
    positions, order = torch.cat([clean_positions, hidden_positions]).sort()
    positions = positions.unsqueeze(0).to(clean.device, non_blocking=True)
    backbone, _ = backbone_and_head(model)
    states = backbone(torch.cat(ids).unsqueeze(0), None, positions, segments=segments, blocks=blocks)[0]
    if clean_at is None:
        return states
    return states[order.argsort().to(clean.device, non_blocking=True)]


for kernel_name, make_mask in (("sdpa", sdpa_mask), ("eager", eager_mask)):
    AttentionInterface.register(PACKED + kernel_name, text_by_text(kernel_name))
    AttentionMaskInterface.register(PACKED + kernel_name, make_mask)
