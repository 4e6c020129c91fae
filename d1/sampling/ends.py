"""The EOS stop: where completions end, and the rows that leave the batch."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor


def eos_cut(completion_ids: Tensor, eos_token_ids: Sequence[int] | Tensor, including: bool = True) -> Tensor:
    """(rows, tokens) bool, true before each row's first EOS, and at it with `including`; all true without one."""
    is_eos = torch.isin(completion_ids, torch.as_tensor(eos_token_ids, device=completion_ids.device))
    return is_eos.cumsum(-1) - is_eos.long() * including == 0


def fill_ended(completion_ids: Tensor, rows: Tensor, filled: Tensor | int, eos_token_ids: Sequence[int]) -> Tensor:
    """Writes the first of `eos_token_ids` over the rest of rows that hold one of them. Does not wait for the device.

    Args:
        completion_ids: (all rows, tokens), changed in place.
        rows: (n,) the rows to look at.
        filled: how many tokens are there already, or (n, 1), as many per row.

    Returns:
        (n,) bool, which of `rows` hold one.
    """
    device, own = completion_ids.device, completion_ids[rows]
    ends = torch.tensor(eos_token_ids).to(device, non_blocking=True)
    hidden = torch.arange(own.shape[1], device=device) >= filled
    ended = (torch.isin(own, ends) & ~hidden).any(1)
    completion_ids[rows] = own.masked_fill(ended.unsqueeze(1) & hidden, eos_token_ids[0])
    return ended
