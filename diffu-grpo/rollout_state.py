"""What TRL leaves out of a checkpoint: the rollout in use, with its masks, and where in its cycle the run stands."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file


def _files(folder: Path, rank: int) -> tuple[Path, Path]:
    return folder / f"rollout_rank{rank}.safetensors", folder / f"rollout_rank{rank}.json"


def save_rollout(trainer: Any, folder: Path) -> None:
    """Writes this rank's buffered micro-batches and counters into the checkpoint `folder`."""
    tensors_file, counters_file = _files(folder, trainer.accelerator.process_index)
    batches = trainer._buffered_inputs or []
    tensors = {
        f"{index}.{key}": value.contiguous().cpu()
        for index, batch in enumerate(batches)
        for key, value in batch.items()
        if isinstance(value, torch.Tensor)
    }
    # Micro-batches are views of one rollout; safetensors refuses shared storage.
    save_file({key: value.clone() for key, value in tensors.items()}, tensors_file)
    counters = {"step": trainer._step, "batches": len(batches), "metrics": trainer._metrics["train"]}
    counters_file.write_text(json.dumps(counters))


def load_rollout(trainer: Any, folder: Path) -> None:
    """Puts back what `save_rollout` wrote.

    Raises:
        ValueError: the checkpoint has no rollout of this rank (another number of processes wrote it).
    """
    tensors_file, counters_file = _files(folder, trainer.accelerator.process_index)
    if not counters_file.exists():
        raise ValueError(
            f"{folder} holds no rollout of rank {trainer.accelerator.process_index}: resume with the number of "
            "processes that wrote it"
        )
    counters = json.loads(counters_file.read_text())
    tensors = load_file(tensors_file, device=str(trainer.accelerator.device))
    batches: list[dict[str, Any]] = [{} for _ in range(counters["batches"])]
    for name, value in tensors.items():
        index, key = name.split(".", 1)
        batches[int(index)][key] = value
    trainer._step = counters["step"]
    trainer._buffered_inputs = batches or None
    trainer._metrics["train"].update(counters["metrics"])
