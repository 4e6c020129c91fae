"""The processes of an evaluation: they take problems from one queue and otherwise only wait for each other."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Sequence
from datetime import timedelta
from typing import Any, TypeVar

import torch.distributed as dist

T = TypeVar("T")
STORE: list[dist.Store] = []  # what the processes count in; empty where there is one process


def join_processes() -> tuple[int, int]:
    """(rank, number of processes), as torchrun or accelerate started them."""
    world = int(os.environ.get("WORLD_SIZE", "1"))
    if world > 1:
        patience = timedelta(days=7)  # a rank may be hours behind another
        store, rank, _ = next(dist.rendezvous("env://", timeout=patience))
        STORE[:] = [dist.PrefixStore("eval", store)]
        dist.init_process_group(
            "gloo", store=dist.PrefixStore("gloo", store), rank=rank, world_size=world, timeout=patience
        )
    return int(os.environ.get("RANK", "0")), world


def leave_processes() -> None:
    if dist.is_initialized():
        dist.destroy_process_group()
    STORE.clear()


def count_together(name: str, more: int) -> int:
    """Adds to a count that all processes share, from 0, and returns it."""
    return STORE[0].add(name, more) if STORE else more


def queue_of(items: Sequence[T], name: str) -> Iterator[T]:
    """`items` in their order, each given to one process only: to whichever asks next. Once a launch for each name."""
    if not STORE:
        yield from items
        return
    while (number := count_together(f"{name} taken", 1) - 1) < len(items):
        yield items[number]


def wait_for_all() -> None:
    if dist.is_initialized():
        dist.barrier()


def from_rank_0(compute: Callable[[], Any]) -> Any:
    """What `compute` returns on rank 0; an exception there is raised on every rank, so that none waits for ever."""
    outcome: list[Any] = [None, None]
    if not dist.is_initialized() or dist.get_rank() == 0:
        try:
            outcome[0] = compute()
        except (ValueError, OSError) as error:
            outcome[1] = error
    if dist.is_initialized():
        dist.broadcast_object_list(outcome, src=0)
    if outcome[1] is not None:
        raise outcome[1]
    return outcome[0]
