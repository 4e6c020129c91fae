"""Two caches between `lasting` and `delayed`, for the trial of README.md: `CACHES.update(REFRESHING)` adds them.

lasting+prompt   as `lasting`, and the first pass of each block also computes the prompt
lasting+whole    as `lasting`, and the first pass of every second block computes all tokens
"""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
from torch import Tensor

from d1.sampling.caches import Cache
from d1.sampling.delayed import DelayedPasses
from d1.sampling.passes import Place

EVERY = 2  # blocks


class RefreshingPasses(DelayedPasses):
    """The cache "lasting", in which the first pass of each block also computes the prompt or, if `whole`, that of every
    second block computes all tokens."""

    def __init__(self, model: Any, *, whole: bool, **options: Any) -> None:
        super().__init__(model, lasts=True, **options)
        self.whole = whole
        self.begun: list[tuple[int, int]] = []  # tokens of each row's prompt, and the number of its block

    def enter(self, places: list[Place], kept: list[int]) -> None:
        super().enter(places, kept)
        self.begun = [(prompt, block + 1) for prompt, block in (self.begun[row] for row in kept)]
        self.begun += [(place.start - place.origin, 0) for place in places[len(kept) :]]
        self.starts = [place.origin for place in places]

    def limits(self, length: int) -> list[int]:
        """The column up to which the first pass computes everything, for each row with a cache; `length` is the
        text's."""
        if self.whole:
            return [0 if block % EVERY else length for _, block in self.begun[: self.old]]
        return [start + prompt for start, (prompt, _) in zip(self.starts, self.begun[: self.old], strict=False)]

    def states(self, ids: Tensor, visible: Tensor, positions: Tensor) -> tuple[Tensor, Tensor]:
        if self.opening and self.old:
            limits = self.limits(ids.shape[1])
            rows = self.in_branches([*range(self.old)], len(ids) // self.branches)
            columns = torch.arange(ids.shape[1], device=ids.device)
            self.stale |= (columns < self.of_rows(limits).unsqueeze(1)) & visible[rows].bool()
            self.width += max(limits)
        return super().states(ids, visible, positions)


REFRESHING = {
    "lasting+prompt": Cache(partial(RefreshingPasses, whole=False)),
    "lasting+whole": Cache(partial(RefreshingPasses, whole=True)),
}
