"""The processes of an evaluation: they share the problems out and otherwise only wait for each other."""

from __future__ import annotations

import os
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import torch.distributed as dist


def join_processes() -> tuple[int, int]:
    """(rank, number of processes), as torchrun or accelerate started them."""
    world = int(os.environ.get("WORLD_SIZE", "1"))
    if world > 1:
        dist.init_process_group("gloo", timeout=timedelta(days=7))  # a rank may be hours behind another
    return int(os.environ.get("RANK", "0")), world


def leave_processes() -> None:
    if dist.is_initialized():
        dist.destroy_process_group()


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
