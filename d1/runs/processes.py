"""Work of several processes: an error in one of them is raised in all, so that none waits for ever."""

from __future__ import annotations

import contextlib
import copy
import pickle
from collections.abc import Callable, Iterator
from typing import TypeVar

from d1.runs.cli import RunError, one_line

T = TypeVar("T")


@contextlib.contextmanager
def together(first: type[Exception] | tuple[type[Exception], ...] = ()) -> Iterator[None]:
    """Raise in all processes what one of them raises inside. Every process must enter.

    Args:
        first: if several processes raise, errors of these classes are raised before others.
    """
    own: Exception | None = None
    try:
        yield
    except Exception as error:
        own = error
    errors = [error for error in from_all(sendable(own)) if error is not None]
    if errors:
        chosen = min(errors, key=lambda error: not isinstance(error, first))
        raise own if own is not None and isinstance(own, first) == isinstance(chosen, first) else chosen


def from_rank_0(compute: Callable[[], T]) -> T:
    """The result of `compute` on rank 0, which all processes get; an exception there is raised in all of them."""
    found: list[T | None] = [None]
    with together():
        if rank() == 0:
            found = [compute()]
    return from_all(found[0])[0]  # type: ignore[return-value]


def from_all(value: T) -> list[T]:
    """The values of all processes, by rank."""
    import torch.distributed as dist  # only now: `eval.py --help` imports this module

    if not (dist.is_available() and dist.is_initialized()):
        return [value]
    values: list[T] = [value] * dist.get_world_size()
    dist.all_gather_object(values, value)
    return values


def rank() -> int:
    import torch.distributed as dist

    return dist.get_rank() if dist.is_available() and dist.is_initialized() else 0


def sendable(error: Exception | None) -> Exception | None:
    """The error, or one with its message alone if it cannot be sent to another process."""
    with contextlib.suppress(Exception):
        pickle.dumps(copy.copy(error))
        return error
    return RunError(one_line(error)) if error is not None else None
