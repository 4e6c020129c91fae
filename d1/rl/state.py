"""What a checkpoint of TRL's leaves out: the rollout in use with its views, where in its cycle the run stands, a synced
reference, and what is not logged yet. With it, a resumed run repeats an unbroken one bit for bit."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from transformers import TrainerCallback

from d1.rl.bridge import restore_trl, rollout_buffer, trl_counters

REFERENCE = "reference.safetensors"
FORMAT = 3  # of the files; version 0.1 wrote none


class RestoreRollout(TrainerCallback):
    """Puts the rollout state of a checkpoint back, once the Trainer has set its own counters."""

    def __init__(self, trainer: Any) -> None:
        self.trainer = trainer

    def on_train_begin(self, *args: Any, **kwargs: Any) -> None:
        folder, self.trainer.resumed_from = self.trainer.resumed_from, None
        if folder is not None:
            load_rollout(self.trainer, folder)


def _files(folder: Path, rank: int) -> tuple[Path, Path]:
    return folder / f"rollout_rank{rank}.safetensors", folder / f"rollout_rank{rank}.json"


def save_rollout(trainer: Any, folder: Path) -> None:
    """Writes this rank's buffered micro-batches and counters into the checkpoint `folder`."""
    tensors_file, counters_file = _files(folder, trainer.accelerator.process_index)
    batches = rollout_buffer(trainer)
    # Micro-batches are views of one rollout and safetensors refuses shared storage, hence the clones.
    tensors = {
        f"{index}.{key}": value.detach().cpu().clone().contiguous()
        for index, batch in enumerate(batches)
        for key, value in batch.items()
        if isinstance(value, torch.Tensor)
    }
    save_file(tensors, tensors_file)
    counters = {"format": FORMAT, "batches": len(batches), "losses": trainer.loss_sums()}
    counters |= {"compute": int(trainer.compute), **trl_counters(trainer)}
    counters_file.write_text(json.dumps(counters, default=list))  # the completions' columns are deques
    if trainer.args.sync_ref_model and trainer.args.should_save:
        reference = {name: value.detach().cpu().contiguous() for name, value in reference_weights(trainer)}
        save_file(reference, folder / REFERENCE)


def reference_weights(trainer: Any) -> Iterator[tuple[str, torch.Tensor]]:
    return trainer.accelerator.unwrap_model(trainer.ref_model).named_parameters()


def check_rollout(folder: Path, processes: int) -> None:
    """Refuses a checkpoint whose rollout this version, or this many processes, cannot go on with.

    Raises:
        ValueError: says what to do instead.
    """
    files = sorted(folder.glob("rollout_rank*.json"))
    if any(json.loads(file.read_text()).get("format") != FORMAT for file in files):
        raise ValueError(
            f"{folder} was written by an earlier version, whose rollouts kept less: finish that run with the version "
            "that began it, or start anew from its weights with --model_path and another --output_dir"
        )
    if len(files) != processes:
        raise ValueError(
            f"{folder} was written by {len(files)} processes and cannot continue in mid-rollout with {processes}: "
            f"start the run with {len(files)}"
        )


def load_rollout(trainer: Any, folder: Path) -> None:
    """Puts back what `save_rollout` wrote.

    Raises:
        ValueError: another version or another number of processes wrote it.
    """
    check_rollout(folder, trainer.accelerator.num_processes)
    tensors_file, counters_file = _files(folder, trainer.accelerator.process_index)
    counters = json.loads(counters_file.read_text())
    tensors = {name: value.to(trainer.accelerator.device) for name, value in load_file(tensors_file).items()}
    trainer.set_loss_sums(counters["losses"])
    trainer.compute = counters["compute"]
    batches: list[dict[str, Any]] = [{} for _ in range(counters["batches"])]
    for name, value in tensors.items():
        index, key = name.split(".", 1)
        batches[int(index)][key] = value
    restore_trl(trainer, batches, counters)
    if trainer.args.sync_ref_model:
        reference = load_file(folder / REFERENCE)
        for name, value in reference_weights(trainer):
            value.data.copy_(reference[name])
