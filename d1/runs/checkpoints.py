"""Checkpoints that are either complete or absent, and the choice of the one from which a run continues."""

from __future__ import annotations

import contextlib
import hashlib
import json
import logging
import os
import shutil
import zipfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from accelerate.utils import broadcast_object_list, gather_object
from safetensors import safe_open
from transformers import TrainerState, TrainingArguments
from transformers.trainer_utils import get_last_checkpoint

from d1.files import give_usual_mode, writing
from d1.runs.console import write_metrics

logger = logging.getLogger(__name__)

STATE = "trainer_state.json"
SUMS = "checksums.json"  # of each other file in a checkpoint: its size in bytes and its SHA-256

# Files of the Trainer, DeepSpeed, FSDP and diffu-GRPO that a model does not need.
ONLY_TO_RESUME = (
    *("optimizer*", "scheduler.pt", "scaler.pt", "rng_state*"),
    *("global_step*", "latest", "zero_to_fp32.py", "pytorch_model_fsdp*"),
    *("rollout_rank*", "rollouts_ahead", "reference*.safetensors", "*_sums.json", SUMS),
)

WEIGHTS = ("model.safetensors", "model.safetensors.index.json", "adapter_model.safetensors", "pytorch_model*")


@contextlib.contextmanager
def staged_checkpoint(trainer: Any) -> Iterator[Path]:
    """Inside, the Trainer writes its checkpoint under `output_dir/.saving`; afterwards, it is renamed to its place.

    So a run that is killed while saving leaves no half-written `checkpoint-N`. Old checkpoints are deleted last.
    Yields the folder that is being written. OSError if it has no room.
    """
    args, state = trainer.args, trainer.state
    final, limit = Path(args.output_dir), args.save_total_limit
    staging = final / ".saving"
    name = f"checkpoint-{state.global_step}"
    if args.should_save:
        shutil.rmtree(staging, ignore_errors=True)
    trainer.accelerator.wait_for_everyone()
    args.output_dir, args.save_total_limit = str(staging), None
    with removed_on_error(staging, args.should_save), writing(final, name, lambda: way_on(final)):
        try:
            yield staging / name
        finally:
            args.output_dir, args.save_total_limit = str(final), limit
        best = final / f"checkpoint-{state.best_global_step}"
        if state.best_global_step and (best.exists() or best.name == name):
            state.best_model_checkpoint = str(best)
        if args.should_save:
            state.save_to_json(str(staging / name / STATE))
        trainer.accelerator.wait_for_everyone()
        write_sums(staging / name, args)
        trainer.accelerator.wait_for_everyone()
    if args.should_save:
        give_usual_mode(staging.rglob("*.safetensors"))
        shutil.rmtree(final / name, ignore_errors=True)
        os.replace(staging / name, final / name)
        shutil.rmtree(staging)
        rotate(final / name, limit, state.best_model_checkpoint)
    trainer.accelerator.wait_for_everyone()


@contextlib.contextmanager
def removed_on_error(folder: Path, remove: bool) -> Iterator[None]:
    """If what is inside raises, the folder is removed (`remove`): its parts are of no use, and may fill a disk."""
    try:
        yield
    except Exception:
        if remove:
            shutil.rmtree(folder, ignore_errors=True)
        raise


def rotate(saved: Path, limit: int | None, best: str | None) -> None:
    """Delete the oldest checkpoints next to `saved`, the newest, until `limit` are left (None: keep all).

    Older means an earlier step, because clocks may step back. Later steps than that of `saved`, from before a resume of
    an earlier checkpoint, are the oldest of all. `saved` and the `best` one stay, also beyond the limit.
    """
    newest = step_of(saved)
    found = [path for path in saved.parent.glob("checkpoint-*") if step_of(path) >= 0 and path.is_dir()]
    found.sort(key=lambda path: (step_of(path) <= newest, step_of(path)))
    kept = {saved.name, Path(best or saved).name}
    spare = max(len(found) - max(limit, len(kept)), 0) if limit and limit > 0 else 0
    for path in [path for path in found if path.name not in kept][:spare]:
        shutil.rmtree(path, ignore_errors=True)


def way_on(output_dir: Path) -> str:
    """What to do when a run has no room, with the name of the last complete checkpoint."""
    last = get_last_checkpoint(str(output_dir)) if output_dir.is_dir() else None
    if last is None:
        return "no checkpoint is complete yet: make room and start the same command again"
    return f"{Path(last).name} is complete: make room and continue with --resume"


def checkpoint_to_resume(output_dir: str | Path, resume: str | bool | None) -> Path | None:
    """The checkpoint from which a run continues: None (start), the last one ("true"), or the folder `resume`.

    ValueError if `output_dir` holds a run and `resume` is not set, or if the folder `resume` is not a checkpoint.
    """
    last = get_last_checkpoint(str(output_dir)) if os.path.isdir(output_dir) else None
    if resume is None or str(resume).lower() == "false":
        if last is not None or (Path(output_dir) / STATE).exists():
            raise ValueError(
                f"{output_dir} holds another run ({Path(last).name if last else 'finished'}): continue it with "
                "--resume, or write to another folder"
            )
        return None
    if str(resume).lower() == "true":
        if last is None:
            logger.warning("No checkpoint in %s yet: starting from the beginning.", output_dir)
        return last and Path(last)
    folder = Path(str(resume))
    if not folder.is_dir() or (step_of(folder) < 0 and not (folder / STATE).is_file()):
        raise ValueError(f"--resume {resume}: it must be true, false or the folder of a checkpoint")
    return folder


def step_of(checkpoint: Path) -> int:
    """The step in a checkpoint's name; -1 for a folder with another name."""
    number = checkpoint.name.removeprefix("checkpoint-")
    return int(number) if number.isdigit() else -1


def broken(checkpoint: Path, name: str | Path, problem: str) -> ValueError:
    """The error for a checkpoint whose file `name` "is missing" or "is damaged"; it names the checkpoint to resume."""
    steps = [path for path in checkpoint.parent.glob("checkpoint-*") if step_of(path) < step_of(checkpoint)]
    way_out = "no earlier checkpoint is left: start the run again in another folder"
    if steps:
        way_out = f"continue from the checkpoint before it with --resume {max(steps, key=step_of)}"
    return ValueError(f"{checkpoint / name} {problem}; {way_out}")


@contextlib.contextmanager
def reading(file: Path, checkpoint: Path | None = None) -> Iterator[None]:
    """Inside, a missing or damaged `file` raises the error of `broken` for its checkpoint (default: its folder)."""
    checkpoint = checkpoint or file.parent
    name = file.relative_to(checkpoint)
    try:
        yield
    except FileNotFoundError as error:
        raise broken(checkpoint, name, "is missing") from error
    except OSError:
        raise
    except Exception as error:  # json, safetensors, zipfile and the readers of their contents raise their own
        raise broken(checkpoint, name, f"is damaged ({error})") from error


def read_state(checkpoint: Path) -> TrainerState:
    """The Trainer's state in a checkpoint; ValueError if the file is missing or damaged."""
    with reading(checkpoint / STATE):
        return TrainerState.load_from_json(str(checkpoint / STATE))


def check_weights_file(checkpoint: Path) -> None:
    """Refuse (ValueError) a checkpoint whose model or adapter is missing or damaged."""
    if not any(path for pattern in WEIGHTS for path in checkpoint.glob(pattern)):
        raise broken(checkpoint, WEIGHTS[0], "is missing")
    shards: set[str] = set()
    for index in checkpoint.glob("*.index.json"):
        with reading(index):
            shards |= {*json.loads(index.read_text())["weight_map"].values()}
    for file in sorted({*checkpoint.rglob("*model*.safetensors"), *map(checkpoint.joinpath, shards)}):
        check_content(checkpoint, file)


def check_checkpoint(checkpoint: Path, args: TrainingArguments, processes: int | None) -> None:
    """Refuse a checkpoint in which a file that the Trainer (5.23) needs to continue exactly is missing or damaged.

    The Trainer itself would not report it: without the optimizer or the scheduler, it starts with a fresh one and the
    peak learning rate; without the state of the random generators, with other random numbers. `check_sums` has compared
    the files with their checksums; in an older checkpoint, which has none, the first process reads what can be checked.
    Nothing is unpickled. ValueError names the file.

    Args:
        processes: how many processes wrote it; None: unknown.
    """
    for names in needed(checkpoint, args, processes):
        if not any(path for pattern in names for path in checkpoint.glob(pattern)):
            raise broken(checkpoint, names[0], "is missing")
    if not args.should_save:
        return
    if not args.deepspeed_plugin:
        check_weights_file(checkpoint)
    if (checkpoint / SUMS).exists():
        return
    for pattern in ("*.pt", "*.pth", "optimizer.bin", "global_step*/*.pt", "*_sums.json"):
        for file in sorted(checkpoint.glob(pattern)):
            check_content(checkpoint, file)


def write_sums(folder: Path, args: TrainingArguments) -> None:
    """Write the checksums of all files of a checkpoint. Every process must call it; they share the files."""
    found = sorted(path.relative_to(folder).as_posix() for path in folder.rglob("*") if path.is_file())
    names = broadcast_object_list([found])[0]  # one list: other machines may see new files late
    mine = {name: sum_of(folder / name) for name in names[args.process_index :: args.world_size]}
    sums = {name: of for part in gather_object([mine]) for name, of in part.items()}
    if args.should_save:
        (folder / SUMS).write_text(json.dumps(dict(sorted(sums.items())), indent=1) + "\n")


def sum_of(file: Path) -> list[int | str]:
    """Size in bytes and SHA-256, in hexadecimal digits, of a file."""
    with file.open("rb") as opened:
        return [file.stat().st_size, hashlib.file_digest(opened, "sha256").hexdigest()]


def check_sums(checkpoint: Path, process: int = 0, processes: int = 1) -> None:
    """Refuse (ValueError) a checkpoint of which a file is not as it was saved; one without checksums passes.

    Args:
        process, processes: this process compares every `processes`-th file, from number `process` on.
    """
    if not (checkpoint / SUMS).is_file():
        return
    with reading(checkpoint / SUMS):
        sums = {name: [size, digest] for name, (size, digest) in json.loads((checkpoint / SUMS).read_text()).items()}
    for name in sorted(sums)[process::processes]:
        with reading(checkpoint / name, checkpoint):
            size, digest = sum_of(checkpoint / name)
            if size != sums[name][0]:
                raise ValueError(f"it has {size} bytes, and {sums[name][0]} were saved")
            if digest != sums[name][1]:
                raise ValueError("its checksum is not that of what was saved")


def needed(checkpoint: Path, args: TrainingArguments, processes: int | None) -> list[tuple[str, ...]]:
    """The files that the Trainer needs, each as alternative patterns, with the usual one first.

    DeepSpeed keeps the optimizer in the folder that `latest` names: under ZeRO in one file per process, else with the
    weights. FSDP keeps it in `optimizer.bin` or, in parts, in the folder `optimizer_0`.
    """
    random = [f"rng_state_{rank}.pth" for rank in range(processes)] if processes else ["rng_state*.pth"]
    files: list[tuple[str, ...]] = [(name,) for name in (["rng_state.pth"] if processes == 1 else random)]
    if not args.deepspeed_plugin:
        return [("optimizer.pt", "optimizer.bin", "optimizer_*/.metadata"), ("scheduler.pt",), *files]
    if not (checkpoint / "latest").is_file():
        return [("latest",)]
    step, stage = (checkpoint / "latest").read_text().strip(), args.deepspeed_plugin.zero_stage
    ranks = [f"zero_pp_rank_{rank}_mp_rank_00" for rank in range(args.world_size)]
    files += [(f"{step}/{rank}_model_states.pt",) for rank in (ranks if stage == 3 else ["mp_rank_00"])]
    if stage:
        files += [(f"{step}/{rank}_optim_states.pt", f"{step}/*_{rank}_optim_states.pt") for rank in ranks]
    return files if "scheduler" in args.deepspeed_plugin.deepspeed_config else [("scheduler.pt",), *files]


def check_content(checkpoint: Path, file: Path) -> None:
    """Read a json file, the header of a safetensors file, or all of a file that `torch.save` wrote."""
    with reading(file, checkpoint):
        if file.suffix == ".json":
            json.loads(file.read_text())
        elif file.suffix == ".safetensors":
            with safe_open(file, "pt"):
                pass
        else:
            with zipfile.ZipFile(file) as archive:
                if changed := archive.testzip():
                    raise ValueError(f"the checksum of {changed} differs")


def is_finished(checkpoint: Path, args: TrainingArguments) -> bool:
    """Whether `checkpoint` is the run's last step. A Trainer resumed there would take one step too many."""
    state = read_state(checkpoint)
    if args.max_steps > 0:
        return state.global_step >= args.max_steps
    return state.num_train_epochs == args.num_train_epochs and state.global_step >= state.max_steps


def finish(checkpoint: Path, output_dir: Path, keep_best: bool) -> None:
    """Write what a Trainer leaves at the end of a run, from its last checkpoint: the model, its state, its metrics.

    Files that only a resume needs are not copied, nor is the card that PEFT writes for an adapter, because the run has
    its own. A folder that is already finished is not changed.

    Args:
        keep_best: take the model of the best checkpoint (`load_best_model_at_end`).
    """
    state = read_state(checkpoint)
    last = output_dir / STATE
    if last.is_file() and TrainerState.load_from_json(str(last)).global_step == state.global_step:
        return
    best = keep_best and state.best_model_checkpoint
    source = checkpoint.with_name(Path(best).name) if best else checkpoint
    for folder in {checkpoint, source}:
        check_sums(folder)
    check_weights_file(source)
    left_out = shutil.ignore_patterns(*ONLY_TO_RESUME, "README.md")
    shutil.copytree(source, output_dir, ignore=left_out, dirs_exist_ok=True)
    shutil.copy(checkpoint / STATE, last)
    write_metrics(output_dir, state.log_history)
