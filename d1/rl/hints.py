"""Hints: parts of a worked solution that a rollout is given.

A group without a right completion has no advantages. With `hints`, its rows are sampled once more, from canvases that
hold parts of the row's worked solution, the column `trace`; right completions among these replace rows of the group
(`hinted.py`). An entry of `HINTS` chooses the parts, and where on the canvas they lie. A new one is a function and an
entry, in a method's file. This module imports no torch, so that the methods' files need none either.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from d1.scoring.entry import describe_function, describe_value

if TYPE_CHECKING:
    from torch import Generator, Tensor

TRACE = "trace"  # the column of a dataset with a worked solution per row, in the form of a completion


@dataclass(frozen=True)
class Hint:
    """An entry of the table of hints.

    Attributes:
        draw: gets the ids of a trace, the length of the canvas and the row's generator, and returns the ids (canvas,)
            that are given, -1 where a token is to be sampled. None: no hints.
    """

    draw: Callable[[Sequence[int], int, Generator], Tensor] | None

    def __call__(self, trace: Sequence[int], gen_length: int, generator: Generator) -> Tensor:
        """The given ids. Raises ValueError if the function returned something else."""
        import torch
        from torch import Tensor

        assert self.draw is not None
        returned = self.draw(trace, gen_length, generator)
        if not isinstance(returned, Tensor) or returned.shape != (gen_length,) or returned.dtype != torch.long:
            expected = f"int64 ids of shape ({gen_length},), -1 where nothing is given"
            raise ValueError(f"{describe_function(self.draw)} returned {describe_value(returned)}: expected {expected}")
        return returned


HINTS: dict[str, Hint] = {"none": Hint(None)}
