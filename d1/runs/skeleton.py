"""A training run from its settings to a saved model: resume or finish, prepare, train, save.

SFT and RL both use `run`; a `Stage` holds what differs between them.
"""

from __future__ import annotations

import contextlib
import logging
import os
import shlex
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from accelerate.utils import gather_object
from torch.optim.lr_scheduler import LambdaLR
from transformers import Trainer, TrainerCallback, TrainingArguments
from transformers.integrations import is_tensorboard_available

from d1.files import give_usual_mode, writing
from d1.runs.checkpoints import check_checkpoint, check_sums, checkpoint_to_resume, finish, is_finished, way_on
from d1.runs.console import log_to_console, log_without_account, train_with_console
from d1.runs.entry import one_line
from d1.runs.fingerprint import ROWS, from_rank_0, of_settings
from d1.runs.lock import FileLock, Held
from d1.runs.model_card import has_card, write_card
from d1.runs.record import OnResume, history, save_record

logger = logging.getLogger(__name__)

# What a checked run adds to its record, and the function that loads the model and makes the trainer.
Prepared = tuple[Mapping[str, Any], Callable[[], Trainer]]


@dataclass(frozen=True)
class Stage:
    """What SFT or RL gives the skeleton.

    Args:
        training: its `resume_from_checkpoint` says where to continue.
        settings: all settings of the run, as far as they are resolved when it is called.
        on_resume: which of them a resume may change.
        prepare: reads and checks rows and settings; ValueError or OSError before a model is loaded. What it adds to the
            record holds the fingerprint of the rows, `rows of SETTING`.
        conclude: writes the stage's own files next to the model; called in the first process.
        ended: whether the stage ended the run at this checkpoint, before `max_steps`.
        check: refuses a checkpoint whose files of this stage are wrong.
        outcome: lines about the saved model, which end the run's log; called in the first process.
        next_command: what to do with the model, in the last line.
    """

    training: TrainingArguments
    settings: Callable[[], Mapping[str, Any]]
    on_resume: OnResume
    prepare: Callable[[], Prepared]
    conclude: Callable[[], object]
    ended: Callable[[Path], bool] = lambda checkpoint: False
    check: Callable[[Path], object] = lambda checkpoint: None
    outcome: Callable[[], Sequence[str]] = lambda: ()
    next_command: Callable[[], str] = lambda: "it is a model path for every command of `python -m d1`"


def run(stage: Stage) -> Any:
    """Run a stage; returns its trainer, or None if the run was already finished.

    Raises:
        ValueError, OSError: a setting, a file or a row is wrong; raised before the model is loaded, wherever possible.
    """
    training, folder = stage.training, Path(str(stage.training.output_dir))
    log_to_console()
    check_processes(training.world_size)
    if training.push_to_hub:  # Trainer would upload from a folder that is renamed meanwhile
        raise ValueError(f"--push_to_hub: upload the finished run instead, with `hf upload NAME {folder}`")

    if "tensorboard" in (training.report_to or ()) and not is_tensorboard_available():
        raise ValueError('--report_to tensorboard: it is not installed; pip install "tensorboard==2.21.*"')
    with only_run(folder, training):
        trainer = run_or_finish(stage, folder)
        if trainer is not None:
            trainer.accelerator.wait_for_everyone()
            trainer.end()
    if training.should_save:
        for line in [*stage.outcome(), f"The {what_is_in(folder)} is in {folder}: {stage.next_command()}"]:
            logger.info(line)
    return trainer


def run_or_finish(stage: Stage, folder: Path) -> Any:
    """`run` without its checks, in the process or processes that hold the folder's lock."""
    training = stage.training
    checkpoint = checkpoint_to_resume(folder, training.resume_from_checkpoint)
    past = history(checkpoint)
    world = {"world_size": training.world_size}
    stage.on_resume.changes(past, {**stage.settings(), **world}, checkpoint or folder)  # refuses another run at once
    if checkpoint and (is_finished(checkpoint, training) or stage.ended(checkpoint)):
        with contextlib.suppress(FileNotFoundError):  # the model may be gone
            stage.on_resume.changes(past, contents_of(stage), checkpoint)
        logger.info("%s is finished: there is nothing left to train.", folder)
        if training.should_save:
            with writing(folder, "the model", lambda: way_on(folder)):
                finish(checkpoint, folder, training.load_best_model_at_end)
                give_usual_mode(folder.glob("*.safetensors"))
                stage.conclude()
                if not has_card(folder):  # a user may have added to it
                    write_card(folder)
        return None
    if checkpoint:
        together(partial(check_sums, checkpoint, training.process_index, training.world_size))
        stage.check(checkpoint)
        check_checkpoint(checkpoint, training, past.settings.get("world_size"))
        training.eval_on_start = False  # done when the run first started

    facts, start = stage.prepare()
    rows = {name: value for name, value in facts.items() if name.startswith(ROWS)}
    settings = {**stage.settings(), **world, **contents_of(stage), **rows}
    changed = stage.on_resume.changes(past, settings, checkpoint or folder)
    with writing(folder, "the files of the run", lambda: way_on(folder)):
        if training.should_save:
            state = training.distributed_state
            distributed = {"distributed_type": state.distributed_type.value if state else "NO"}
            save_record(folder, {**settings, **facts, **distributed}, past, changed)
            if "wandb" in (training.report_to or ()):
                log_without_account(folder)

        trainer = start()
        if changed:
            trainer.add_callback(RestartSchedule("learning_rate" in changed))
        train_with_console(trainer, checkpoint)
        trainer.save_model()
        trainer.save_state()
        if training.should_save:
            stage.conclude()
            write_card(folder)
            give_usual_mode(folder.glob("*.safetensors"))
    return trainer


@contextlib.contextmanager
def only_run(folder: Path, training: TrainingArguments) -> Iterator[None]:
    """Hold the lock of a run's folder: two runs would mix their metrics and delete each other's checkpoints.

    The first process takes it and tells the others, which must all call this. ValueError, in each of them, if another
    run holds it; the message names its process.
    """
    lock, made = FileLock(folder / ".lock"), not folder.exists()

    def take() -> None:
        folder.mkdir(parents=True, exist_ok=True)
        try:
            lock.take()
        except Held as holder:
            todo = "wait until that run ends, stop it, or choose another folder"
            raise ValueError(f"{holder} writes to {folder}: {todo}") from None

    from_rank_0(take)
    try:
        yield
    finally:
        lock.release(remove=True)
        if made and training.process_index == 0:
            with contextlib.suppress(OSError):  # nothing was written
                folder.rmdir()


def together(check: Callable[[], object]) -> None:
    """Call `check` in every process. If it raises ValueError or OSError in one of them, all raise ValueError, so that
    none waits for another."""
    problem = ""
    try:
        check()
    except (ValueError, OSError) as error:
        problem = one_line(error)
    if problems := [one for one in gather_object([problem]) if one]:
        raise ValueError(problems[0])


def what_is_in(folder: Path) -> str:
    """What a finished run saved there, in a word."""
    return "adapter" if (folder / "adapter_config.json").exists() else "model"


def evaluation(folder: str, task: str, flags: Mapping[str, Any]) -> str:
    """The command that evaluates the model in `folder` on a task; flags that are None keep their defaults."""
    words = [part for name, value in flags.items() if value is not None for part in (f"--{name}", str(value))]
    return shlex.join(["python", "-m", "d1", "eval", "--model_path", folder, "--dataset", task, *words])


def contents_of(stage: Stage) -> dict[str, Any]:
    """The fingerprints of what the settings of a run name, which only the first process computes."""
    return dict(from_rank_0(lambda: of_settings(stage.settings())))


def check_processes(world_size: int) -> None:
    """Refuse (ValueError) several processes that are not connected, each of which would train the whole run.

    `accelerate launch` starts such processes if there is no GPU.
    """
    launched = int(os.environ.get("WORLD_SIZE", "1"))
    if launched != world_size:
        raise ValueError(
            f"{launched} processes were started, but each would train alone: set ACCELERATE_USE_CPU=true to train with "
            "several processes on a CPU, or start a single one"
        )


class RestartSchedule(TrainerCallback):
    """Makes a resumed run use the learning rate that its new settings give for its step.

    The checkpoint holds the peak rate of the old settings, and the rate of its step under their warm-up and length.
    """

    def __init__(self, new_peak: bool) -> None:
        self.new_peak = new_peak

    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        scheduler = getattr(kwargs["lr_scheduler"], "scheduler", kwargs["lr_scheduler"])  # Accelerate wraps it
        if isinstance(scheduler, LambdaLR):
            rates = [args.learning_rate * share(scheduler.last_epoch) for share in scheduler.lr_lambdas]
            scheduler.base_lrs, scheduler._last_lr = [args.learning_rate for _ in rates], rates
            for group, rate in zip(kwargs["optimizer"].param_groups, rates, strict=True):
                group["lr"], group["initial_lr"] = rate, args.learning_rate
        elif self.new_peak:
            raise ValueError(f"--learning_rate cannot change under --lr_scheduler_type {args.lr_scheduler_type}")
