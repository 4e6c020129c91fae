"""What a checkpoint of TRL's leaves out: the rollout in use with its masks, where in its cycle the run stands, a synced
reference, what is not logged yet, and the order of later epochs. With it, a resumed run repeats an unbroken one bit for
bit."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from transformers import TrainerCallback
from trl.trainer.utils import RepeatSampler

REFERENCE = "reference.safetensors"


class EpochSampler(RepeatSampler):
    """TRL's sampler with an order that is a function of (seed, epoch), so that a run resumed in a later epoch finds it.

    Delete when TRL's RepeatSampler does not start again from the first epoch's order.
    """

    def __init__(self, *args: Any, epoch: Callable[[], int], **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.epoch = epoch

    def __iter__(self) -> Iterator[int]:
        if self.shuffle:
            self.generator.manual_seed((self.seed or 0) + self.epoch())
        return super().__iter__()


class RestoreRollout(TrainerCallback):
    """Puts the rollout state back once the Trainer has set its own counters."""

    def __init__(self, trainer: Any) -> None:
        self.trainer = trainer

    def on_train_begin(self, *args: Any, **kwargs: Any) -> None:
        if self.trainer.resumed_from is not None:
            load_rollout(self.trainer, self.trainer.resumed_from)
            self.trainer.resumed_from = None


def _files(folder: Path, rank: int) -> tuple[Path, Path]:
    return folder / f"rollout_rank{rank}.safetensors", folder / f"rollout_rank{rank}.json"


def save_rollout(trainer: Any, folder: Path) -> None:
    """Writes this rank's buffered micro-batches and counters into the checkpoint `folder`."""
    tensors_file, counters_file = _files(folder, trainer.accelerator.process_index)
    batches = trainer._buffered_inputs or []
    # Micro-batches are views of one rollout and safetensors refuses shared storage, hence the clones.
    tensors = {
        f"{index}.{key}": value.detach().cpu().clone().contiguous()
        for index, batch in enumerate(batches)
        for key, value in batch.items()
        if isinstance(value, torch.Tensor)
    }
    save_file(tensors | {"loss": trainer._tr_loss.detach().cpu().clone()}, tensors_file)
    counters = {
        "step": trainer._step,
        "batches": len(batches),
        "metrics": trainer._metrics["train"],
        "last_logged": trainer._globalstep_last_logged,
        "total_loss": trainer._total_loss_scalar,
        "completions": trainer._logs if trainer.log_completions else {},
    }
    counters_file.write_text(json.dumps(counters, default=list))  # the completions' columns are deques
    if trainer.args.sync_ref_model and trainer.args.should_save:
        reference = {name: value.detach().cpu().contiguous() for name, value in reference_weights(trainer)}
        save_file(reference, folder / REFERENCE)


def reference_weights(trainer: Any) -> Iterator[tuple[str, torch.Tensor]]:
    return trainer.accelerator.unwrap_model(trainer.ref_model).named_parameters()


def load_rollout(trainer: Any, folder: Path) -> None:
    """Puts back what `save_rollout` wrote.

    Raises:
        ValueError: the checkpoint has no rollout of this rank (another number of processes wrote it).
    """
    tensors_file, counters_file = _files(folder, trainer.accelerator.process_index)
    written = len(list(folder.glob("rollout_rank*.json")))
    if written != trainer.accelerator.num_processes:
        raise ValueError(
            f"{folder} was written by {written} processes and cannot continue in mid-rollout with "
            f"{trainer.accelerator.num_processes}: start the run with {written}"
        )
    counters = json.loads(counters_file.read_text())
    tensors = {name: value.to(trainer.accelerator.device) for name, value in load_file(tensors_file).items()}
    trainer._tr_loss = tensors.pop("loss")
    batches: list[dict[str, Any]] = [{} for _ in range(counters["batches"])]
    for name, value in tensors.items():
        index, key = name.split(".", 1)
        batches[int(index)][key] = value
    trainer._step = counters["step"]
    trainer._buffered_inputs = batches or None
    trainer._metrics["train"].update(counters["metrics"])
    trainer._globalstep_last_logged = counters["last_logged"]
    trainer._total_loss_scalar = counters["total_loss"]
    for group, columns in counters["completions"].items():
        if isinstance(columns, list):
            trainer._logs[group].extend(columns)
        else:
            for name, column in columns.items():
                trainer._logs[group][name].extend(column)
    if trainer.args.sync_ref_model:
        reference = load_file(folder / REFERENCE)
        for name, value in reference_weights(trainer):
            value.data.copy_(reference[name])
