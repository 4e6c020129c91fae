"""The processes of a run."""

from __future__ import annotations

import os
import sys
from typing import Any

import torch
from transformers import (
    PreTrainedModel,
)


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


def unwrapped(accelerator: Any, model: Any) -> Any:
    """The model inside whatever Accelerate wrapped around it.

    Accelerate's own way reads package metadata on every call: 2 ms, too long for a small model that nothing wraps.
    """
    return model if isinstance(model, PreTrainedModel) else accelerator.unwrap_model(model)


def leave() -> None:
    """Ends a script at once, once all is written, where several processes trained on the CPU.

    gloo's threads may outlive the process group and abort the interpreter's shutdown ("terminate called without an
    active exception"), which a launcher takes for a failure. Delete when PyTorch joins them.
    """
    if int(os.environ.get("WORLD_SIZE", "1")) == 1 or torch.cuda.is_available():
        return
    wandb = sys.modules.get("wandb")
    if wandb is not None and wandb.run is not None:
        wandb.finish()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(0)
