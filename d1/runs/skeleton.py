"""A training run from its settings to a published model: resume or finish, prepare, train, publish.

SFT and RL both run through `run`; a `Stage` holds what is theirs.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from huggingface_hub import HfApi
from huggingface_hub.utils import validate_repo_id
from torch.optim.lr_scheduler import LambdaLR
from transformers import Trainer, TrainerCallback, TrainingArguments
from transformers.trainer_utils import HubStrategy

from d1.runs.checkpoints import ONLY_TO_RESUME, check_checkpoint, checkpoint_to_resume, finish, is_finished
from d1.runs.console import RunConsole, log_to_console, log_without_account, train_with_console
from d1.runs.entry import one_line
from d1.runs.model_card import has_card, write_card
from d1.runs.output_dir import writing
from d1.runs.record import OnResume, history, save_record

logger = logging.getLogger(__name__)

# What the folder of a run holds besides the model: its checkpoints, and files that name folders of this machine.
STAYS_HERE = (
    *(*ONLY_TO_RESUME, "checkpoint-*", "_*", ".*", "wandb/*", "completions/*", "merged/*"),
    *("run.json", "trainer_state.json", "training_args.bin"),
)

# What a checked run adds to its record, and what loads the model and makes the trainer.
Prepared = tuple[Mapping[str, Any], Callable[[], tuple[Trainer, RunConsole]]]


@dataclass(frozen=True)
class Stage:
    """What SFT or RL gives the skeleton.

    Args:
        training: its `resume_from_checkpoint` says where to continue.
        settings: all settings of the run, as far as they are resolved by then.
        on_resume: which of them a resume may change.
        ended: whether the run ended at this checkpoint before `max_steps`, for a reason of its own.
        check: refuses a checkpoint for what the stage keeps in it.
        prepare: reads and checks rows and settings; ValueError or OSError before a model is loaded.
        conclude: writes what the stage leaves with the model; called in the first process.
    """

    training: TrainingArguments
    settings: Callable[[], Mapping[str, Any]]
    on_resume: OnResume
    ended: Callable[[Path], bool]
    check: Callable[[Path], object]
    prepare: Callable[[], Prepared]
    conclude: Callable[[], object]


def run(stage: Stage) -> Any:
    """Runs a stage; returns its trainer, or None where the run was finished already.

    Raises:
        ValueError, OSError: a setting, a file or a row makes no sense; wherever possible, before the model is loaded.
    """
    training, folder = stage.training, Path(str(stage.training.output_dir))
    log_to_console()
    check_processes(training.world_size)
    push = hold_push(training)

    checkpoint = checkpoint_to_resume(folder, training.resume_from_checkpoint)
    past = history(checkpoint)
    world = {"world_size": training.world_size}
    stage.on_resume.changes(past, {**stage.settings(), **world}, checkpoint or folder)  # refuses another run at once
    if checkpoint and (is_finished(checkpoint, training) or stage.ended(checkpoint)):
        logger.info("%s is finished: there is nothing left to train.", folder)
        if training.should_save:
            finish(checkpoint, folder, training.load_best_model_at_end)
            stage.conclude()
            publish(training, push, started_again=True)
        return None
    if checkpoint:
        stage.check(checkpoint)
        check_checkpoint(checkpoint, training, past.settings.get("world_size"))
        training.eval_on_start = False  # it was, at the start

    facts, start = stage.prepare()
    settings = {**stage.settings(), **world}
    changed = stage.on_resume.changes(past, settings, checkpoint or folder)
    if training.should_save:
        state = training.distributed_state
        distributed = {"distributed_type": state.distributed_type.value if state else "NO"}
        save_record(folder, {**settings, **facts, **distributed}, past, changed)
        if "wandb" in (training.report_to or ()):
            log_without_account(folder)

    trainer, console = start()
    if changed:
        trainer.add_callback(RestartSchedule("learning_rate" in changed))
    train_with_console(trainer, console, checkpoint)
    with writing(folder):
        trainer.save_model()
        trainer.save_state()
        if training.should_save:
            stage.conclude()
    trainer.accelerator.wait_for_everyone()
    trainer.end()
    if training.should_save:  # the other processes need not wait for an upload
        publish(training, push)
    return trainer


def check_processes(world_size: int) -> None:
    """Refuses (ValueError) several processes that do not know of each other, each of which would train the whole run.

    `accelerate launch` starts such processes where there is no GPU.
    """
    launched = int(os.environ.get("WORLD_SIZE", "1"))
    if launched != world_size:
        raise ValueError(
            f"{launched} processes were started, but each would train alone: set ACCELERATE_USE_CPU=true to train with "
            "several processes on a CPU, or start a single one"
        )


class RestartSchedule(TrainerCallback):
    """Has a resumed run use the learning rate that its own settings give for its step.

    The checkpoint holds the peak rate of the settings before, and the rate of its step under their warm-up and length.
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


def hold_push(args: Any) -> bool:
    """Has a Trainer of these `TrainingArguments` not push; returns whether it would have.

    Trainer makes a repository before the first step, so that no run starts without a network, and uploads in the
    background from the folder that a checkpoint is written to, which here is renamed. So a run uploads at its end.

    Raises:
        ValueError: the hub takes no such name, or checkpoints are to be pushed.
    """
    if not args.push_to_hub:
        return False
    strategy = HubStrategy(args.hub_strategy).value
    if strategy in ("checkpoint", "all_checkpoints"):
        raise ValueError(f"--hub_strategy {strategy}: a run uploads its model, at its end, and no checkpoints")
    try:
        validate_repo_id(repository(args))
    except ValueError as error:
        raise ValueError(f"--hub_model_id: {error}") from error
    args.push_to_hub = False
    return True


def repository(args: Any) -> str:
    """The name to upload to; that of the folder if none is given, as Trainer has it."""
    return args.hub_model_id or Path(args.output_dir).absolute().name


def publish(args: Any, push: bool, started_again: bool = False) -> None:
    """Writes the card of a finished run, and uploads its model if `push`. A failed upload is logged and does no harm.

    Args:
        args: its `TrainingArguments`.
        started_again: it was finished before; a card that it has, with results that were added since, then stays.
    """
    folder, name = str(args.output_dir), repository(args)
    if not (started_again and has_card(folder)):
        write_card(folder, args.hub_model_id)
    if not push:
        return
    try:
        hub = HfApi(token=args.hub_token)
        name = hub.create_repo(name, private=args.hub_private_repo, exist_ok=True).repo_id
        hub.upload_folder(
            repo_id=name,
            folder_path=folder,
            commit_message="A model trained with d1",
            ignore_patterns=[*STAYS_HERE],
            revision=args.hub_revision,
        )
    except Exception as error:  # whatever a network, a proxy or the hub comes up with: the run is done and saved
        logger.error(
            "%s is complete, but was not uploaded to %s: %s. The same command with --resume tries again.",
            *(folder, name, one_line(error).rstrip(".")),
        )
    else:
        logger.info("Uploaded to %s", name)
