"""All blocks of a block-causal model, noised at once: one forward pass over a clean and a noised stream.

The noised tokens follow the whole clean text. Each of them sees the noised tokens of its own block and the clean text
of earlier blocks (BD3-LM, arXiv 2503.09573, section 3.2; the mask is `Attention.rule`).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from d1.models.head import body_and_head


def two_stream_states(model: Any, clean: Tensor, noised: Tensor, visible: Tensor | None) -> Tensor:
    """States (rows, n, hidden) of each noised token, aligned to the token that each one scores.

    Args:
        model: a prepared block-causal model.
        clean: (rows, length) ids.
        noised: (rows, n) ids of the last n tokens, some of them hidden. The states of a block that begins before these
            tokens are useless.
        visible: (rows, length), 0 at padding; None if there is none.
    """
    length, count = clean.shape[1], noised.shape[1]
    own = torch.arange(length, length + count, device=clean.device).expand(len(clean), -1)
    return body_and_head(model)[0](torch.cat([clean, noised], dim=1), visible, own, noised=count)


def packed_two_stream_states(
    model: Any, clean: Tensor, noised: Tensor, lengths: Sequence[int], hidden: Tensor
) -> Tensor:
    """`two_stream_states` of the hidden tokens of a packed row: (hidden tokens, hidden size), in the order of the row.

    Each text is followed by its noised copy, which begins with the first block that has hidden tokens.

    Args:
        model: a prepared block-causal model that takes packed rows (`packing.py`).
        clean, noised: (1, tokens) ids of texts with `lengths` tokens.
        hidden: (1, tokens) bool; if it is on the CPU, nothing waits for the device.
    """
    size: int = model.config.block_size
    ids, segments, asked = [], [], []
    for text, copy, mask in zip(*(values[0].split(list(lengths)) for values in (clean, noised, hidden)), strict=True):
        first = int(mask.int().argmax()) // size * size if mask.any() else len(text)
        ids += [text, copy[first:]]
        asked += [torch.zeros_like(mask), mask[first:]]
        segments.append((len(text), len(text) - first))
    at = torch.cat(asked).nonzero().T.to(clean.device, non_blocking=True)
    return body_and_head(model)[0](torch.cat(ids).unsqueeze(0), None, at, segments=segments)[0]
