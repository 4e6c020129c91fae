"""Save and restore what TRL's checkpoints leave out: the current rollout with its views, the position in the cycle of
updates, a synced reference, and metrics that are not logged yet. A resumed run then equals an unbroken one bit for
bit."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file

from d1.rl.ahead import saved
from d1.rl.bridge import restore_trl, rollout_buffer, trl_counters
from d1.rl.updates import Batch
from d1.runs.checkpoints import reading

REFERENCE = "reference.safetensors"
FORMAT = 5  # of the files
COUNTERS = {"batches", "losses", "compute", "step", "metrics", "completions"}


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
    counters = {"format": FORMAT, "batches": len(batches), "losses": trainer.loss_sums(), **trl_counters(trainer)}
    counters |= {"processes": trainer.accelerator.num_processes, "compute": int(trainer.compute)}
    counters_file.write_text(json.dumps(counters, default=list))  # the completions' columns are deques
    if trainer.args.sync_ref_model and trainer.args.should_save:
        reference = {name: value.detach().cpu().contiguous() for name, value in reference_weights(trainer)}
        save_file(reference, folder / REFERENCE)
    if trainer.ahead is not None:
        trainer.ahead.save(folder)


def reference_weights(trainer: Any) -> Iterator[tuple[str, torch.Tensor]]:
    return trainer.accelerator.unwrap_model(trainer.ref_model).named_parameters()


def read_counters(folder: Path, rank: int = 0) -> dict[str, Any]:
    """The counters of one process in a checkpoint. Raises ValueError if the file is missing or damaged."""
    file = _files(folder, rank)[1]
    with reading(file):
        counters = json.loads(file.read_text())
        if not isinstance(counters, dict) or "step" not in counters:
            raise ValueError("not the counters of a run")
        if missing := COUNTERS - counters.keys() if counters.get("format") == FORMAT else ():
            raise ValueError(f"without {', '.join(sorted(missing))}")
        return counters


def check_rollout(folder: Path, args: Any) -> None:
    """Raises ValueError for a checkpoint whose rollout is incomplete or that a run of `args` cannot continue."""
    counters = read_counters(folder)
    if counters.get("format") != FORMAT:
        raise ValueError(
            f"{folder} was written by another version, which stores rollouts in another format: finish the run with "
            "that version, or start a new run from its weights (--model_path, another --output_dir)"
        )
    processes = counters.get("processes", len([*folder.glob("rollout_rank*.json")]))
    if processes != args.world_size:
        raise ValueError(
            f"{folder} was written by {processes} processes, and a rollout in progress cannot continue with "
            f"{args.world_size}: start the run with {processes}"
        )
    for rank in range(processes):
        file, batches = _files(folder, rank)[0], read_counters(folder, rank)["batches"]
        with reading(file), safe_open(file, "pt") as tensors:
            names = {*tensors.keys()}
            columns = {name.partition(".")[2] for name in names} | {"canvas_ids", "view_noise", "view_weights"}
            if wrong := names ^ {f"{index}.{column}" for index in range(batches) for column in columns}:
                raise ValueError(f"{batches} micro-batches of a rollout have other tensors: {min(wrong)}")
    if args.rollout_staleness:
        saved(folder)
    if args.sync_ref_model:
        with reading(folder / REFERENCE), safe_open(folder / REFERENCE, "pt"):
            pass


def load_rollout(trainer: Any, folder: Path) -> None:
    """Puts back what `save_rollout` wrote. Raises ValueError as `check_rollout` does, or for a damaged file."""
    check_rollout(folder, trainer.args)
    rank = trainer.accelerator.process_index
    tensors_file, counters_file = _files(folder, rank)
    counters = read_counters(folder, rank)
    batches: list[Batch] = [{} for _ in range(counters["batches"])]
    with reading(tensors_file):
        for name, value in load_file(tensors_file).items():
            index, column = name.split(".", 1)
            batches[int(index)][column] = value.to(trainer.accelerator.device)
    with reading(counters_file):
        trainer.set_loss_sums(counters["losses"])
        trainer.compute = counters["compute"]
        restore_trl(trainer, batches, counters)
    if trainer.args.sync_ref_model:
        with reading(folder / REFERENCE):
            reference = load_file(folder / REFERENCE)
            for name, value in reference_weights(trainer):
                value.data.copy_(reference[name])
    if trainer.ahead is not None:
        trainer.ahead.load(folder)
