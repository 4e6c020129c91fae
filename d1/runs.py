"""What a run needs around its Trainer: checkpoints that are whole or absent, resuming, a record of itself."""

from __future__ import annotations

import contextlib
import importlib.metadata
import json
import logging
import os
import platform
import shutil
import socket
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from urllib.parse import urlparse

import torch
from transformers import PreTrainedModel, TrainerState, TrainingArguments
from transformers.trainer_utils import get_last_checkpoint, rotate_checkpoints

logger = logging.getLogger(__name__)

LIBRARIES = ("torch", "transformers", "trl", "peft", "accelerate", "datasets", "deepspeed", "bitsandbytes")

# Of the Trainer, DeepSpeed, FSDP and diffu-GRPO.
ONLY_TO_RESUME = (
    *("optimizer*", "scheduler.pt", "scaler.pt", "rng_state*"),
    *("global_step*", "latest", "zero_to_fp32.py", "pytorch_model_fsdp*"),
    *("rollout_rank*", "reference.safetensors"),
)


@contextlib.contextmanager
def staged_checkpoint(trainer: Any) -> Iterator[Path]:
    """Inside, the Trainer writes its checkpoint under `output_dir/.saving`; after, it is renamed to its place.

    A run killed while saving therefore leaves no half-written `checkpoint-N`. Yields the folder being written. Old
    checkpoints are rotated out only after the new one is in place.
    """
    args, state = trainer.args, trainer.state
    final, limit = Path(args.output_dir), args.save_total_limit
    staging = final / ".saving"
    name = f"checkpoint-{state.global_step}"
    if args.should_save:
        shutil.rmtree(staging, ignore_errors=True)
    trainer.accelerator.wait_for_everyone()
    args.output_dir, args.save_total_limit = str(staging), None
    try:
        yield staging / name
    finally:
        args.output_dir, args.save_total_limit = str(final), limit
    best = final / f"checkpoint-{state.best_global_step}"
    if state.best_global_step and (best.exists() or best.name == name):
        state.best_model_checkpoint = str(best)
    trainer.accelerator.wait_for_everyone()
    if args.should_save:
        state.save_to_json(str(staging / name / "trainer_state.json"))
        shutil.rmtree(final / name, ignore_errors=True)
        os.replace(staging / name, final / name)
        shutil.rmtree(staging)
        rotate_checkpoints(
            output_dir=str(final),
            save_total_limit=limit,
            best_model_checkpoint=state.best_model_checkpoint,
            use_mtime=True,
        )
    trainer.accelerator.wait_for_everyone()


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


def checkpoint_to_resume(output_dir: str, resume: str | bool | None) -> str | None:
    """The checkpoint a run continues from: None (start), the last one ("true"), or the folder named.

    Raises:
        ValueError: `output_dir` already holds checkpoints or a finished run and resuming was not asked for, or the
            folder named is not there.
    """
    last = get_last_checkpoint(output_dir) if os.path.isdir(output_dir) else None
    if resume is None or str(resume).lower() == "false":
        if last is not None or (Path(output_dir) / "trainer_state.json").exists():
            raise ValueError(
                f"{output_dir} holds another run ({Path(last).name if last else 'finished'}): add "
                "--resume_from_checkpoint true to continue it, or choose another output_dir"
            )
        return None
    if str(resume).lower() == "true":
        if last is None:
            logger.warning("No checkpoint in %s yet: starting from the beginning.", output_dir)
        return last
    if not os.path.isdir(str(resume)):
        raise ValueError(f"resume_from_checkpoint={resume!r} is neither true, false nor a checkpoint folder")
    return str(resume)


def is_finished(checkpoint: str | None, args: TrainingArguments) -> bool:
    """Whether `checkpoint` is the run's last step. A Trainer resumed there would take one step too many."""
    if checkpoint is None:
        return False
    state = TrainerState.load_from_json(os.path.join(checkpoint, "trainer_state.json"))
    if args.max_steps > 0:
        return state.global_step >= args.max_steps
    return state.num_train_epochs == args.num_train_epochs and state.global_step >= state.max_steps


def copy_model(checkpoint: str, output_dir: str | Path) -> None:
    """The files of a checkpoint without those that only a resume needs: what a Trainer saves at the end of a run."""
    shutil.copytree(checkpoint, output_dir, ignore=shutil.ignore_patterns(*ONLY_TO_RESUME), dirs_exist_ok=True)


def log_without_account(folder: str | Path) -> None:
    """Weights & Biases logs to local files where no account is set up or its server cannot be reached."""
    import wandb

    os.environ.setdefault("WANDB_DIR", str(folder))
    if "WANDB_MODE" in os.environ:
        return
    server = urlparse(os.environ.get("WANDB_BASE_URL", "https://api.wandb.ai"))
    try:
        socket.create_connection((server.hostname, server.port or 443), timeout=5).close()
        online = wandb.login(prompt=False)
    except OSError:
        online = False
    if not online:
        os.environ["WANDB_MODE"] = "offline"


def run_record() -> dict[str, Any]:
    """Versions and hardware, to be saved beside results."""
    versions = {}
    for name in LIBRARIES:
        with contextlib.suppress(importlib.metadata.PackageNotFoundError):
            versions[name] = importlib.metadata.version(name)
    gpus = [torch.cuda.get_device_name(index) for index in range(torch.cuda.device_count())]
    return {
        "python": platform.python_version(),
        "versions": versions,
        "gpus": gpus,
        "cpu": {"machine": platform.machine(), "cores": os.cpu_count()},
        "processes": int(os.environ.get("WORLD_SIZE", "1")),
    }


def save_record(output_dir: str, name: str, settings: dict[str, Any]) -> Path:
    """Writes `output_dir/name` with the resolved settings of a run and `run_record()`."""
    path = Path(output_dir) / name
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps({"settings": settings} | run_record(), indent=1, default=str) + "\n")
    return path
