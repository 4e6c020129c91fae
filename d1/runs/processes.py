"""The processes of a run."""

from __future__ import annotations

import os


def check_processes(world_size: int) -> None:
    """Refuses to start where a launcher started several processes that do not know of each other.

    Without a GPU `accelerate launch` leaves them alone, and each would train the whole run into the same folder.

    Raises:
        ValueError: says how to launch instead.
    """
    launched = int(os.environ.get("WORLD_SIZE", "1"))
    if launched != world_size:
        raise ValueError(
            f"{launched} processes were started, but each would train alone: set ACCELERATE_USE_CPU=true to train with "
            "several processes on a CPU, or start a single one"
        )
