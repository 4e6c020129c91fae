"""Operations on the key-value caches of Transformers: selecting, joining, and reading without writing."""

from __future__ import annotations

from copy import copy
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import pad
from transformers import DynamicCache
from transformers.cache_utils import DynamicLayer


class ReadOnlyLayer(DynamicLayer):
    """A layer whose keys and values a pass reads in front of its own, and does not change."""

    keys: Tensor
    values: Tensor

    def update(self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
        return torch.cat([self.keys, key_states], dim=-2), torch.cat([self.values, value_states], dim=-2)


def layers_of(past: DynamicCache) -> list[Any]:
    layers: Any = past.layers
    return list(layers)


def same_layers(past: DynamicCache) -> DynamicCache:
    """A cache with the keys and values of `past`; changes to it do not change `past`."""
    copied = copy(past)
    copied.layers = [copy(layer) for layer in past.layers]
    return copied


def read_only(past: DynamicCache) -> DynamicCache:
    """A cache with the keys and values of `past`, to which a pass adds none of its own."""
    read = same_layers(past)
    for layer in layers_of(read):
        layer.__class__ = ReadOnlyLayer
    return read


def is_read_only(past: DynamicCache) -> bool:
    return any(isinstance(layer, ReadOnlyLayer) for layer in past.layers)


def select_rows(past: DynamicCache, rows: Tensor) -> DynamicCache:
    """A cache of these rows of `past`, which is not changed."""
    if not past.get_seq_length():
        return DynamicCache()
    selected = same_layers(past)
    selected.batch_select_indices(rows)
    return selected


def join_rows(parts: list[DynamicCache], order: Tensor) -> DynamicCache:
    """One cache with the rows of all parts, padded on the left, in the order `order`."""
    whole, width = same_layers(parts[0]), max(past.get_seq_length() for past in parts)
    for number, layer in enumerate(layers_of(whole)):
        layers = [layers_of(past)[number] for past in parts]
        layer.keys = torch.cat([left_pad_values(part.keys, width) for part in layers])[order]
        layer.values = torch.cat([left_pad_values(part.values, width) for part in layers])[order]
    return whole


def left_pad_values(values: Tensor, width: int) -> Tensor:
    """Keys or values (rows, heads, tokens, size), padded on the left to `width` tokens."""
    missing = width - values.shape[2]
    if not missing:
        return values
    return pad(values, (0, 0, missing, 0))
