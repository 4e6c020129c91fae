"""Two streams compared with one forward pass per block, for every kind of block-causal model."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from d1.masking import keyed_generator
from d1.models import load_model
from d1.models.head import body_and_head
from d1.models.packing import two_stream_states
from tests.d1.released import BLOCKS

PADDING, LENGTH = 5, 23


def block_by_block(model: Any, clean: Tensor, noised: Tensor) -> Tensor:
    """(length, hidden) of one text without padding: each block noised, after the clean blocks before it, alone."""
    states, size, body = [], model.config.block_size, body_and_head(model)[0]
    for start in range(0, len(clean), size):
        text = torch.cat([clean[:start], noised[start : start + size]])
        states.append(body(text[None])[0, start:])
    return torch.cat(states)


@pytest.mark.parametrize("attention", ["sdpa", "eager"])
@pytest.mark.parametrize("name", BLOCKS)
@torch.no_grad()
def test_two_streams_are_the_blocks_one_by_one(kind_dirs, name, attention):
    """With padding on either side, and for a copy without the first blocks."""
    model: Any = load_model(kind_dirs[name], attn_implementation=attention)
    size = model.config.block_size = 4
    clean = torch.randint(4, 64, (size, LENGTH), generator=keyed_generator(0))
    hidden = torch.rand(clean.shape, generator=keyed_generator(1)) < 0.6
    noised = clean.masked_fill(hidden, 3)
    ids, masks = torch.full((size, LENGTH + PADDING), 7), torch.zeros(size, LENGTH + PADDING, dtype=torch.long)
    copies = ids.clone()
    for row in range(size):
        place = slice(row, row + LENGTH)
        ids[row, place], copies[row, place], masks[row, place] = clean[row], noised[row], 1
    whole = two_stream_states(model, ids, copies, masks)
    part = two_stream_states(model, ids, copies[:, -17:], masks)
    for row in range(size):
        expected = block_by_block(model, clean[row], noised[row])
        torch.testing.assert_close(whole[row, row : row + LENGTH], expected, atol=1e-5, rtol=0)
        # The copy begins at column 11 and so in the middle of a block, unless row + 4 n is 11.
        first = next(k for k in range(LENGTH) if k % size == 0 and row + k >= LENGTH + PADDING - 17)
        torch.testing.assert_close(part[row, first + row - 11 : LENGTH + row - 11], expected[first:], atol=1e-5, rtol=0)
        alone = two_stream_states(model, clean[row : row + 1], noised[row : row + 1], None)[0]
        torch.testing.assert_close(alone, expected, atol=1e-5, rtol=0)
    assert whole.isfinite().all()
    assert part.isfinite().all()
