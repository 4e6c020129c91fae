"""Checkpoints that are whole or absent, and where a run continues from."""

from __future__ import annotations

import contextlib
import logging
import os
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from transformers import TrainerState, TrainingArguments
from transformers.trainer_utils import get_last_checkpoint, rotate_checkpoints

from d1.runs.output_dir import writing

logger = logging.getLogger(__name__)


# Files of the Trainer, DeepSpeed, FSDP and diffu-GRPO that a model does not need.
ONLY_TO_RESUME = (
    *("optimizer*", "scheduler.pt", "scaler.pt", "rng_state*"),
    *("global_step*", "latest", "zero_to_fp32.py", "pytorch_model_fsdp*"),
    *("rollout_rank*", "reference.safetensors", "loss_sums.json"),
)


@contextlib.contextmanager
def staged_checkpoint(trainer: Any) -> Iterator[Path]:
    """Inside, the Trainer writes its checkpoint under `output_dir/.saving`; after, it is renamed to its place.

    A run killed while saving therefore leaves no half-written `checkpoint-N`. Yields the folder being written. Old
    checkpoints are rotated out only after the new one is in place.

    Raises:
        OSError: the disk is full; the message names the checkpoint.
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
        with writing(final / name):
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


def checkpoint_to_resume(output_dir: str, resume: str | bool | None) -> str | None:
    """The checkpoint a run continues from: None (start), the last one ("true"), or the folder named.

    Raises:
        ValueError: `output_dir` already holds checkpoints or a finished run and resuming was not asked for, or the
            folder named is no checkpoint.
    """
    last = get_last_checkpoint(output_dir) if os.path.isdir(output_dir) else None
    if resume is None or str(resume).lower() == "false":
        if last is not None or (Path(output_dir) / "trainer_state.json").exists():
            raise ValueError(
                f"{output_dir} holds another run ({Path(last).name if last else 'finished'}): continue it with "
                "--resume, or write to another folder"
            )
        return None
    if str(resume).lower() == "true":
        if last is None:
            logger.warning("No checkpoint in %s yet: starting from the beginning.", output_dir)
        return last
    if not (Path(str(resume)) / "trainer_state.json").is_file():
        raise ValueError(f"--resume {resume}: neither true, false nor the folder of a checkpoint")
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
    """The files of a checkpoint without those that only a resume needs: what a Trainer saves at the end of a run. The
    card that PEFT puts beside an adapter stays behind, for the run has its own."""
    left_out = shutil.ignore_patterns(*ONLY_TO_RESUME, "README.md")
    shutil.copytree(checkpoint, output_dir, ignore=left_out, dirs_exist_ok=True)
