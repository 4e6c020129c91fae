"""Which rows share an optimizer step: a function of the seed and the epoch, however processes share them."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch.utils.data import Sampler

from d1.masking import keyed_generator

IGNORED = -100  # the label of what is not trained on, which Trainer does not count
ORDER = 2  # the second part of the key of the rows' order; another value would change it


class Slot(NamedTuple):
    """A place in a global batch (all rows of an optimizer step)."""

    row: int  # -1: an empty slot, which fills up the last batch of an epoch
    epoch: int = 0
    t: float | None = None  # the diffusion time; None: drawn from U(0, 1)
    length: int = 0  # the row is filled with EOS up to this number of tokens


@dataclass(eq=False)
class GlobalBatchSampler(Sampler[Slot]):
    """The slots of an epoch, one global batch after another. Batches do not depend on the number of processes.

    Args:
        lengths: tokens of each row.
        batch_size: rows per optimizer step: rows per device x accumulation x processes.
        multiple: rows per device x processes. Empty slots fill the epoch up to a multiple of it, so that no row is used
            twice.
        epoch: returns the epoch; called when the epoch begins.
        fill: whether rows are filled to the longest row of their batch.
    """

    lengths: Sequence[int]
    batch_size: int
    multiple: int
    seed: int
    epoch: Callable[[], int]
    fill: bool = False

    def __len__(self) -> int:
        return -(-len(self.lengths) // self.multiple) * self.multiple

    def __iter__(self) -> Iterator[Slot]:
        epoch = self.epoch()
        order = torch.randperm(len(self.lengths), generator=keyed_generator(self.seed, ORDER, epoch)).tolist()
        for first in range(0, len(order), self.batch_size):
            rows = order[first : first + self.batch_size]
            length = max(self.lengths[row] for row in rows) if self.fill else 0
            yield from [Slot(row, epoch, length=length) for row in rows]
        yield from [Slot(-1)] * (len(self) - len(order))
