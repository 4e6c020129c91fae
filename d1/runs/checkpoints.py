"""Checkpoints that are either complete or absent, and the choice of the one from which a run continues."""

from __future__ import annotations

import contextlib
import hashlib
import json
import logging
import math
import os
import shutil
from collections.abc import Iterable, Iterator, Sequence
from functools import partial
from pathlib import Path

from accelerate.utils import broadcast_object_list, gather_object
from transformers import Trainer, TrainerState, TrainingArguments
from transformers.trainer_utils import get_last_checkpoint

from d1.files import give_usual_mode, sync, writing
from d1.models.fingerprints import RECORD
from d1.runs.console import write_metrics

logger = logging.getLogger(__name__)

STATE = "trainer_state.json"
ABANDONED = "abandoned"  # the folder of a run with the checkpoints of a branch that it does not continue
SUMS = "checksums.json"  # of each other file in a checkpoint: its size in bytes and its SHA-256

# Files of the Trainer, DeepSpeed, FSDP and diffu-GRPO that a model does not need.
RESUME_FILES = (
    "optimizer*",
    "scheduler.pt",
    "scaler.pt",
    "rng_state*",
    "global_step*",
    "latest",
    "zero_to_fp32.py",
    "pytorch_model_fsdp*",
    "rollout_rank*",
    "rollouts_ahead",
    "reference*.safetensors",
    "*_sums.json",
    SUMS,
)

END_SETTINGS = frozenset({"max_steps", "num_epochs", "num_train_epochs"})  # where a run ends, in all stages
WEIGHTS = ("model.safetensors", "model.safetensors.index.json", "adapter_model.safetensors", "pytorch_model*")
SAVED_WEIGHTS = ("*.safetensors", "*.safetensors.index.json", "pytorch_model*")  # with the parts of a split model


@contextlib.contextmanager
def staged_checkpoint(trainer: Trainer, limit: int | None = None, resumed_step: int | None = None) -> Iterator[Path]:
    """Inside, the Trainer writes its checkpoint under `output_dir/.saving`; afterwards, it is moved to `output_dir`.

    So a run that is killed while saving leaves no half-written `checkpoint-N`. Old checkpoints are deleted last.
    Yields the folder that is being written. OSError if it has no room.

    Args:
        limit: the number of checkpoints to keep (`rotate`), because the Trainer is to delete none itself.
        resumed_step: of the first checkpoint after a resume, the step that the run continues from: checkpoints of later
            steps are set aside (`set_aside_later`).
    """
    args = trainer.args
    state = trainer.state
    final = Path(str(args.output_dir))
    staging = final / ".saving"
    name = f"checkpoint-{state.global_step}"
    if args.should_save:
        shutil.rmtree(staging, ignore_errors=True)
    trainer.accelerator.wait_for_everyone()

    args.output_dir = str(staging)
    with contextlib.ExitStack() as on_error, writing(final, name, partial(disk_full_advice, final)):
        if args.should_save:  # its parts are of no use, and may fill a disk
            on_error.callback(shutil.rmtree, staging, ignore_errors=True)
        try:
            yield staging / name
        finally:
            args.output_dir = str(final)

        # The Trainer has noted the best checkpoint's path under `staging`.
        best = final / f"checkpoint-{state.best_global_step}"
        if state.best_global_step and (best.exists() or best.name == name):
            state.best_model_checkpoint = str(best)
        if args.should_save:
            state.save_to_json(str(staging / name / STATE))
            if (final / RECORD).is_file():  # of this branch: a resume replaces the run's own at its start
                shutil.copy(final / RECORD, staging / name)
        trainer.accelerator.wait_for_everyone()
        write_sums(staging / name, args)
        trainer.accelerator.wait_for_everyone()
        on_error.pop_all()

    if args.should_save:
        give_usual_mode(staging.rglob("*.safetensors"))
        if resumed_step is not None:
            set_aside_later(final, resumed_step)
        shutil.rmtree(final / name, ignore_errors=True)
        os.replace(staging / name, final / name)
        sync(final)  # before an older checkpoint is deleted
        shutil.rmtree(staging)
        rotate(final / name, limit, state.best_model_checkpoint)
    trainer.accelerator.wait_for_everyone()


def numbered_checkpoints(output_dir: Path) -> list[Path]:
    """The checkpoints of a run by their steps, the earliest first."""
    checkpoints = [path for path in output_dir.glob("checkpoint-*") if checkpoint_step(path) >= 0 and path.is_dir()]
    return sorted(checkpoints, key=checkpoint_step)


def set_aside_later(output_dir: Path, step: int) -> None:
    """Move the checkpoints of a run with later steps than `step`, which it continues from, into its folder `ABANDONED`:
    a later resume would take the last of them. Delete the state of its earlier end, which reports would show."""
    if final_step(output_dir) > step:
        (output_dir / STATE).unlink()
    later = [path for path in numbered_checkpoints(output_dir) if checkpoint_step(path) > step]
    if not later:
        return
    abandoned = output_dir / ABANDONED
    abandoned.mkdir(exist_ok=True)
    for path in later:
        target = abandoned / path.name
        copies = 1
        while target.exists():  # of an earlier branch
            copies += 1
            target = abandoned / f"{path.name}-{copies}"
        path.rename(target)
    names = ", ".join(path.name for path in later)
    logger.info("The run continues from step %d: %s of the run before are now in %s.", step, names, abandoned)


def rotate(saved: Path, limit: int | None, best: str | None) -> None:
    """Delete the oldest checkpoints next to `saved`, the newest, until `limit` are left (None: keep all). Older means
    an earlier step, because clocks may go back. `saved` and the `best` one stay, also beyond the limit."""
    checkpoints = numbered_checkpoints(saved.parent)
    protected = {saved.name, Path(best or saved).name}
    excess = 0
    if limit and limit > 0:
        excess = max(len(checkpoints) - max(limit, len(protected)), 0)
    deletable = [path for path in checkpoints if path.name not in protected]
    for path in deletable[:excess]:
        shutil.rmtree(path, ignore_errors=True)


def disk_full_advice(output_dir: Path) -> str:
    """The advice for a run whose disk is full; it names the last complete checkpoint."""
    last = None
    if output_dir.is_dir():
        last = get_last_checkpoint(str(output_dir))
    if last is None:
        return "no checkpoint is complete yet: make room and start the same command again"
    return f"{Path(last).name} is complete: make room and continue with --resume"


def checkpoint_to_resume(output_dir: str | Path, resume: str | bool | None) -> Path | None:
    """The checkpoint from which a run continues: None (start), the last one ("true", or the folder of the run itself),
    or the folder `resume`. For a finished run without checkpoints, it is the folder of the run.

    ValueError if `output_dir` holds a run and `resume` is not set or is a checkpoint of another run, or if the folder
    `resume` is not a checkpoint.
    """
    last = None
    if os.path.isdir(output_dir):
        last = get_last_checkpoint(str(output_dir))
    holds_run = last is not None or (Path(output_dir) / STATE).exists()
    state = Path(last).name if last else "finished"

    if resume is None or str(resume).lower() == "false":
        if holds_run:
            raise ValueError(
                f"{output_dir} holds another run ({state}): continue it with --resume, or write to another folder"
            )
        return None
    folder = Path(str(resume))
    run_folder = Path(output_dir).resolve()
    if last and (str(resume).lower() == "true" or folder.resolve() == run_folder):
        return Path(last)
    if str(resume).lower() == "true":
        return Path(output_dir) if holds_run else None

    if not folder.is_dir() or (checkpoint_step(folder) < 0 and not (folder / STATE).is_file()):
        raise ValueError(f"--resume {resume}: it must be true, false or the folder of a checkpoint")
    if holds_run and run_folder not in (folder.resolve(), folder.absolute().parent.resolve()):
        raise ValueError(
            f"--resume {resume} is not directly in {output_dir}, which holds a run already ({state}): copy the "
            "checkpoint into this folder if it is of the same run, or write to another folder"
        )
    return folder


def checkpoint_step(checkpoint: Path) -> int:
    """The step in a checkpoint's name; -1 for a folder with another name."""
    number = checkpoint.name.removeprefix("checkpoint-")
    return int(number) if number.isdigit() else -1


def broken_checkpoint_error(checkpoint: Path, name: str | Path, problem: str) -> ValueError:
    """The error for a checkpoint whose file `name` "is missing" or "is damaged"; it names the checkpoint to resume."""
    step = checkpoint_step(checkpoint)
    earlier = [path for path in checkpoint.parent.glob("checkpoint-*") if 0 <= checkpoint_step(path) < step]
    advice = "no earlier checkpoint is left: start the run again in another folder"
    if earlier:
        advice = f"continue from the checkpoint before it with --resume {max(earlier, key=checkpoint_step)}"
    return ValueError(f"{checkpoint / name} {problem}; {advice}")


@contextlib.contextmanager
def reading_checkpoint(file: Path, checkpoint: Path | None = None) -> Iterator[None]:
    """Inside, a missing or damaged `file` raises `broken_checkpoint_error` for its checkpoint (default: its folder)."""
    checkpoint = checkpoint or file.parent
    try:
        yield
    except Exception as error:  # json, safetensors, zipfile and the readers of their contents raise their own
        missing = isinstance(error, FileNotFoundError)
        if isinstance(error, OSError) and not missing:
            raise
        problem = "is missing" if missing else f"is damaged ({error})"
        raise broken_checkpoint_error(checkpoint, file.relative_to(checkpoint), problem) from error


def read_state(checkpoint: Path) -> TrainerState:
    """The Trainer's state in a checkpoint; ValueError if the file is missing or damaged."""
    with reading_checkpoint(checkpoint / STATE):
        return TrainerState.load_from_json(str(checkpoint / STATE))


def has_any(folder: Path, patterns: Sequence[str]) -> bool:
    """Whether a folder has a file whose name fits one of the patterns."""
    return any(True for pattern in patterns for _ in folder.glob(pattern))


def check_weights_file(checkpoint: Path) -> None:
    """Refuse (ValueError) a checkpoint without the weights of a model or an adapter."""
    if not has_any(checkpoint, WEIGHTS):
        raise broken_checkpoint_error(checkpoint, WEIGHTS[0], "is missing")


def check_checkpoint(checkpoint: Path, args: TrainingArguments) -> None:
    """Refuse (ValueError) a checkpoint without the optimizer or the scheduler as this launch saves them: the Trainer
    (5.23) would silently start with fresh ones. FSDP keeps the optimizer in `optimizer.bin` or, in parts, in
    `optimizer_0`. DeepSpeed keeps it in the folder that `latest` names, with the scheduler if its config has one."""
    deepspeed = args.deepspeed_plugin
    required: list[tuple[str, ...]] = []  # one of each must exist
    if deepspeed:
        required.append(("latest",))
    else:
        required.append(("optimizer.pt", "optimizer.bin", "optimizer_*/.metadata"))
    if not (deepspeed and "scheduler" in deepspeed.deepspeed_config):
        required.append(("scheduler.pt",))
    for patterns in required:
        if not has_any(checkpoint, patterns):
            raise broken_checkpoint_error(checkpoint, patterns[0], "is missing")
    if not deepspeed:
        check_weights_file(checkpoint)


def write_sums(folder: Path, args: TrainingArguments) -> None:
    """Write the checksums of all files of a checkpoint, and wait until all of it is on the disk. Every process must
    call this, and does it for a part of the files."""
    files = sorted(path.relative_to(folder).as_posix() for path in folder.rglob("*") if path.is_file())
    names = broadcast_object_list([files])[0]  # one list: other machines may see new files late
    local_sums = {}
    for name in names[args.process_index :: args.world_size]:
        local_sums[name] = file_checksum(folder / name)
        sync(folder / name)
    sums = {}
    for process_sums in gather_object([local_sums]):
        sums.update(process_sums)
    if args.should_save:
        (folder / SUMS).write_text(json.dumps(dict(sorted(sums.items())), indent=1) + "\n")
        sync(folder / SUMS)
        for path in (folder, *folder.rglob("*")):
            if path.is_dir():
                sync(path)


def file_checksum(file: Path) -> list[int | str]:
    """Size in bytes and SHA-256, in hexadecimal digits, of a file."""
    with file.open("rb") as opened:
        return [file.stat().st_size, hashlib.file_digest(opened, "sha256").hexdigest()]


def read_sums(checkpoint: Path) -> dict[str, list[int | str]]:
    """The checksums of the files of a checkpoint, by their names; ValueError if they are missing or damaged."""
    if not (checkpoint / SUMS).is_file():
        raise broken_checkpoint_error(checkpoint, SUMS, "is missing (versions up to 0.3 wrote none)")
    with reading_checkpoint(checkpoint / SUMS):
        sums = json.loads((checkpoint / SUMS).read_text())
        return {name: [size, digest] for name, (size, digest) in sums.items()}


def check_sums(checkpoint: Path, process: int = 0, processes: int = 1) -> None:
    """Refuse (ValueError) a checkpoint with a file that is missing or differs from the saved one. Unpickles nothing.
    Process number `process` compares every `processes`-th file."""
    sums = read_sums(checkpoint)
    for name in sorted(sums)[process::processes]:
        check_file(checkpoint, name, sums[name])


def check_file(checkpoint: Path, name: str, checksum: list[int | str]) -> None:
    """Refuse (ValueError) a checkpoint whose file `name` is missing or has another checksum."""
    with reading_checkpoint(checkpoint / name, checkpoint):
        if file_checksum(checkpoint / name) != checksum:
            raise ValueError("its checksum is not that of what was saved")


def check_record(checkpoint: Path) -> None:
    """Refuse (ValueError) a checkpoint whose record of the run is damaged: it is read before the other files are
    compared."""
    if (checkpoint / RECORD).is_file() and (checkpoint / SUMS).is_file():
        sums = read_sums(checkpoint)
        if RECORD in sums:
            check_file(checkpoint, RECORD, sums[RECORD])


def is_finished(checkpoint: Path, args: TrainingArguments, changed: Iterable[str]) -> bool:
    """Whether `checkpoint` is the run's last step, or a later one. A Trainer resumed there would take a step too many.

    `changed`: the settings that differ from the run's record. Trainer's state does not tell: it rounds epochs up, and
    has the epochs that `max_steps` reached into.
    """
    state = read_state(checkpoint)
    if args.max_steps > 0:
        return state.global_step >= args.max_steps
    has_same_end = state.num_train_epochs == math.ceil(args.num_train_epochs) and END_SETTINGS.isdisjoint(changed)
    if has_same_end:
        return state.global_step >= state.max_steps
    return (state.epoch or 0.0) >= args.num_train_epochs


def finish(checkpoint: Path, output_dir: Path, keep_best: bool) -> None:
    """Write what a Trainer leaves at the end of a run, from its last checkpoint: the model, its state, its metrics.

    `keep_best` takes the model of the best checkpoint. Neither files that only a resume needs are copied, nor the
    record, nor PEFT's card of an adapter, because the run has its own. A folder that is already finished, with these
    weights, is not changed. ValueError if a checkpoint is damaged or missing.
    """
    state = read_state(checkpoint)
    source = checkpoint
    if keep_best and state.best_model_checkpoint:
        source = checkpoint.with_name(Path(state.best_model_checkpoint).name)
        if not source.is_dir():  # in the folder of the run that this one continues
            source = Path(state.best_model_checkpoint)
    if final_step(output_dir) == state.global_step and has_weights_of(output_dir, source):
        return
    require_best(source)
    check_weights_file(source)
    for folder in {checkpoint, source}:
        check_sums(folder)
    left_out = shutil.ignore_patterns(*RESUME_FILES, RECORD, "README.md")
    shutil.copytree(source, output_dir, ignore=left_out, dirs_exist_ok=True)
    shutil.copy(checkpoint / STATE, output_dir / STATE)
    write_metrics(output_dir, state.log_history)


def final_step(output_dir: Path) -> int:
    """The last step of a finished run, by the state in its folder; -1 if that is missing, or cut off by a kill or a
    full disk."""
    with contextlib.suppress(OSError, ValueError):
        return TrainerState.load_from_json(str(output_dir / STATE)).global_step
    return -1


def has_weights_of(output_dir: Path, checkpoint: Path) -> bool:
    """Whether the folder of a finished run has the weights of a checkpoint, by the checksums there. Without checksums,
    or if the checkpoint was deleted since: whether it has weights."""
    if not (checkpoint / SUMS).is_file():
        return has_any(output_dir, WEIGHTS)
    resume_only = shutil.ignore_patterns(*RESUME_FILES)
    for name, checksum in read_sums(checkpoint).items():
        is_saved = any(Path(name).match(pattern) for pattern in SAVED_WEIGHTS)
        if not is_saved or resume_only("", [*Path(name).parts]):
            continue
        file = output_dir / name
        if not file.is_file() or file_checksum(file) != checksum:
            return False
    return True


def require_best(checkpoint: Path) -> None:
    """Refuse (ValueError) a missing checkpoint from which a run is to take its model at the end."""
    if not checkpoint.is_dir():
        todo = "put it back, or continue with --resume and without load_best_model_at_end (SFT: --keep_last)"
        raise ValueError(f"{checkpoint}, the best checkpoint of this run, is missing: {todo}")
