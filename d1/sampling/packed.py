"""Passes over padded rows without padding and without a mask: the texts of a batch form one packed row.

Flash attention reads where texts end, and takes no mask over queries. With padded rows, Transformers would remove the
padding in front of each layer and put it back after it, and would wait for the device each time. Here it is removed
once per pass, and the host asks for the lengths once per block.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from d1.sampling.passes import Block, Passes


class PackedPasses(Passes):
    """`Passes` for a kernel that is told where texts end (`d1.models.packing`), whose results differ by rounding."""

    lengths: list[int] | None  # of the texts; None: not known yet for these rows
    real: Tensor  # (tokens,) the indices of real tokens in the flattened batch
    number: Tensor  # (rows, length) the index in the packed row of each token, or of a real one of its row

    def begin_blocks(self, blocks: list[Block], kept: list[int]) -> None:
        self.lengths = None

    def gather_cache_rows(self, rows: Tensor) -> None:
        self.lengths = None

    def states(self, ids: Tensor, visible: Tensor, positions: Tensor) -> tuple[Tensor, Tensor]:
        if not self.needs_attention_mask:
            return super().states(ids, visible, positions)
        if self.lengths is None:
            self.lengths = self.locate_tokens(visible)
        segments: Any = [(length, 0) for length in self.lengths]  # no text has noised copies
        packed = ids.flatten()[self.real].unsqueeze(0)
        at = self.number.gather(1, positions).flatten().unsqueeze(0)
        states = self.backbone(packed, None, at, segments=segments)
        return states[0].unflatten(0, positions.shape), visible.sum(-1)

    def locate_tokens(self, visible: Tensor) -> list[int]:
        """Sets where each token of these rows is packed to, and returns their lengths."""
        lengths = visible.sum(1)
        self.real = visible.flatten().nonzero().squeeze(1)
        self.number = visible.flatten().cumsum(0).view_as(visible) - 1
        first = lengths.cumsum(0) - lengths  # padding belongs to the first token of its row
        self.number = torch.maximum(self.number, first.unsqueeze(1))
        return lengths.tolist()  # type: ignore[no-any-return]
