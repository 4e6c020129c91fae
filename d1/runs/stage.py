"""A training run from its settings to a saved model: check, resume or finish, prepare, train, save.

A `Stage` is what differs between SFT, RL, preference training and distillation; `run` is what they share. `stage_of`
makes the `Stage` of those with `TrainingSettings`.
"""

from __future__ import annotations

import contextlib
import logging
import os
import shlex
import shutil
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from peft import LoraConfig, PeftModel, get_peft_model, prepare_model_for_kbit_training
from torch.optim.lr_scheduler import LambdaLR
from transformers import Trainer, TrainerCallback, TrainingArguments, get_scheduler, set_seed
from transformers.integrations import is_tensorboard_available

from d1.files import FileLock, LockHeldError, check_output_dir, give_usual_mode, writing
from d1.models import load_model, load_tokenizer
from d1.models.adapters import lora_targets, merge_adapter
from d1.models.attention import has_causal_context
from d1.models.convert import merge
from d1.models.folder import ModelFolder
from d1.models.kinds import has_masks
from d1.models.precision import cpu_runs_bf16
from d1.models.tokenizer import check_chat_template
from d1.runs.checkpoints import (
    check_checkpoint,
    check_sums,
    checkpoint_to_resume,
    disk_full_advice,
    finish,
    is_finished,
)
from d1.runs.cli import TrainingSettings, from_rank_0, raise_together, require_equal, require_shared
from d1.runs.console import log_to_console, log_without_account, train_with_console
from d1.runs.record import (
    ROWS,
    SIGN,
    OnResume,
    hash_settings,
    identity,
    read_history,
    save_record,
    write_card,
)
from d1.transformers_bridge import RECOMPUTE

logger = logging.getLogger(__name__)

# --- What a stage is --------------------------------------------------------------------------------------------------

# What a checked run adds to its record, and the function that loads the model and makes the trainer.
Prepared = tuple[Mapping[str, Any], Callable[[], Trainer]]


@dataclass(frozen=True)
class Stage:
    """A run from its settings to a saved model: what differs between the stages, and `run`. `prepare` reads and checks
    rows and settings; ValueError or OSError before a model is loaded. What it adds to the record holds the fingerprint
    of the rows, `rows of SETTING`. Only the first process calls `conclude`, `next_command` and `outcome`."""

    training: TrainingArguments  # its `resume_from_checkpoint` says where to continue
    settings: Callable[[], Mapping[str, Any]]  # all of the run; `prepare` may resolve some: called before and after
    on_resume: OnResume  # which of them a resume may change
    prepare: Callable[[], Prepared]
    conclude: Callable[[], object]  # writes the stage's own files next to the model
    next_command: Callable[[], str]  # what to do with the model, in the last line
    ended: Callable[[Path], bool] = lambda checkpoint: False  # the stage ended the run here, before `max_steps`
    outcome: Callable[[], Sequence[str]] = lambda: ()  # lines about the saved model, which end the run's log

    def run(self) -> Any:
        """Run the stage; returns its trainer, or None if the run was already finished. Raises as `Program.main`."""
        training, folder = self.training, Path(str(self.training.output_dir))
        check_processes(training.world_size)
        if training.push_to_hub:  # Trainer would upload from a folder that is renamed meanwhile
            raise ValueError(f"--push_to_hub: upload the finished run instead, with `hf upload NAME {folder}`")
        check_trainer_arguments(training)
        require_equal(
            training.bf16, "some processes would train in bf16 and others not, by checks of their CPUs: pass --bf16"
        )
        with folder_lock(folder, training):
            trainer = self.run_or_finish(folder)
        if training.should_save:
            kind = "adapter" if (folder / "adapter_config.json").exists() else "model"
            for line in self.outcome():
                logger.info(line)
            logger.info("The %s is in %s: %s", kind, folder, self.next_command())
        return trainer

    def run_or_finish(self, folder: Path) -> Any:
        """`run` without its checks, in the process or processes that hold the folder's lock."""
        training = self.training
        checkpoint = checkpoint_to_resume(folder, training.resume_from_checkpoint)
        if checkpoint is None and str(training.resume_from_checkpoint).lower() == "true":
            logger.warning("No checkpoint in %s yet: starting from the beginning.", folder)
        history = read_history(checkpoint)
        world = {"world_size": training.world_size}
        # Another run than the one in the folder is refused at once.
        changed = self.on_resume.changes(history, {**self.settings(), **world}, checkpoint or folder)
        if checkpoint and (is_finished(checkpoint, training, changed) or self.ended(checkpoint)):
            self.finish_again(folder, checkpoint)
            return None
        if checkpoint and checkpoint.resolve() == folder.resolve():
            raise ValueError(f"{folder} is finished, and no checkpoint is left to continue from: use another folder")
        if checkpoint:
            with raise_together():
                check_sums(checkpoint, training.process_index, training.world_size)
            check_checkpoint(checkpoint, training)
            training.eval_on_start = False  # done when the run first started

        facts, make_trainer = self.prepare()
        rows = {name: value for name, value in facts.items() if name.startswith(ROWS)}
        settings = {**self.settings(), **world, **self.contents(), **rows}
        changed = self.on_resume.changes(history, settings, checkpoint or folder)
        with writing(folder, "the files of the run", partial(disk_full_advice, folder)):
            if training.should_save and "wandb" in (training.report_to or ()):
                log_without_account(folder)
            trainer: Any = make_trainer()
            trainer.checked_checkpoint = checkpoint
            if training.should_save:
                facts = {
                    **facts,
                    "uniform_noise": not has_masks(trainer.model.config),
                    "causal_context": has_causal_context(trainer.model.config),
                    # Accelerate decides on FSDP when a trainer is made.
                    "distributed_type": trainer.accelerator.distributed_type.value,
                }
                save_record(folder, {**settings, **facts}, history, changed)
            if changed or (checkpoint and not history.settings):  # without a record, any setting may have changed
                trainer.add_callback(RestartSchedule("learning_rate" in changed))
            train_with_console(trainer, checkpoint)
            trainer.save_model()
            trainer.save_state()
            if training.should_save:
                self.conclude()
                write_card(folder)
                give_usual_mode(folder.glob("*.safetensors"))
        trainer.accelerator.wait_for_everyone()
        trainer.accelerator.end_training()
        return trainer

    def finish_again(self, folder: Path, checkpoint: Path) -> None:
        """Write the files of a finished run that are missing, from its last checkpoint."""
        training = self.training
        with contextlib.suppress(FileNotFoundError):  # the model that it started from may be gone
            self.on_resume.changes(read_history(checkpoint), self.contents(), checkpoint)
        logger.info("%s is finished: there is nothing left to train.", folder)
        if not training.should_save:
            return
        with writing(folder, "the model", partial(disk_full_advice, folder)):
            finish(checkpoint, folder, training.load_best_model_at_end)
            give_usual_mode(folder.glob("*.safetensors"))
            self.conclude()
            card = folder / "README.md"  # which may be PEFT's, or this library's with additions of a user
            if not card.is_file() or SIGN not in card.read_text():
                write_card(folder)

    def contents(self) -> dict[str, Any]:
        """The fingerprints of what the settings of a run name, which only the first process computes."""

        def hash_contents() -> dict[str, Any]:
            return hash_settings(self.settings())

        return from_rank_0(hash_contents)


def check_trainer_arguments(training: TrainingArguments) -> None:
    """Raises ValueError for arguments that a Trainer would refuse, after the model is loaded."""
    if "tensorboard" in (training.report_to or ()) and not is_tensorboard_available():
        raise ValueError("--report_to tensorboard: pip install -e '.[tensorboard]' in the checkout")
    weight = torch.nn.Parameter(torch.zeros(1))
    name = training.lr_scheduler_type
    kwargs: Any = training.lr_scheduler_kwargs
    try:
        get_scheduler(name, torch.optim.SGD([weight], lr=1.0), 1, 2, scheduler_specific_kwargs=kwargs)
    except (TypeError, ValueError) as error:
        raise ValueError(f"--lr_scheduler_type {getattr(name, 'value', name)}: {error}") from error


# --- The stages with `TrainingSettings` -------------------------------------------------------------------------------

TOKENISING_SECONDS = 6 * 3600  # that processes wait for one another; the first tokenises large data for them
ROWS_PER_STEP = "batch_size x grad_accum_steps x world_size"  # each factor may change if the product stays
FIXED = (  # on a resume; each stage adds its own
    "train_data",
    "plain_chat_template",
    "bad_rows",
    "seed",
    ROWS_PER_STEP,
    # They determine the weights in the checkpoint.
    "model_name",
    "full_finetuning",
    "lora_r",
    "lora_alpha",
    "lora_target_modules",
    "load_in_4bit",
    # The checkpoint's optimizer and scheduler keep their own values: new ones would have no effect.
    "weight_decay",
    "lr_scheduler_type",
)
FREE = (
    "output_dir",
    "job_name",
    "debugging",
    "report_to",
    "resume",
    "num_proc",
    "logging_steps",
    "gradient_checkpointing",
    "merge_at_end",
)


def on_resume(*fixed: str, free: Sequence[str] = ()) -> OnResume:
    """What may change on a resume: `fixed` and `free` are the settings of one stage alone."""
    return OnResume(dict.fromkeys((*FIXED, *fixed), identity), (*FREE, *free))


def stage_of(
    args: TrainingSettings,
    training: TrainingArguments,
    model_folder: ModelFolder,
    prepare: Callable[..., tuple[Mapping[str, Any], Callable[[Any], Trainer]]],
    on_resume: OnResume,
    lora_dropout: float = 0.0,
    **stage_fields: Any,
) -> Stage:
    """The `Stage` of SFT, preference training or distillation; `training` and `model_folder` are from
    `trainer_arguments`, `stage_fields` are further fields of `Stage`. `prepare` gets `args`, `training`, the tokenizer
    and `model_folder`, and returns what `Stage.prepare` returns, where the function gets the model."""
    folder = Path(str(training.output_dir))

    rows_per_step = args.batch_size * args.grad_accum_steps * training.world_size

    def settings() -> dict[str, Any]:
        return {**vars(args), ROWS_PER_STEP: rows_per_step}

    def prepare_run() -> Prepared:
        tokenizer = load_tokenizer(args.model_name, plain_chat_template=args.plain_chat_template)
        check_chat_template(tokenizer, args.model_name)
        facts, make_trainer = prepare(args, training, tokenizer, model_folder)

        def load_and_make_trainer() -> Trainer:
            set_seed(args.seed)  # LoRA's first weights are drawn before the Trainer seeds itself
            return make_trainer(prepare_model(args, model_folder, lora_dropout))

        return facts, load_and_make_trainer

    def conclude() -> None:
        if args.merge_at_end:
            shutil.rmtree(folder / "merged", ignore_errors=True)
            merge(args.model_name, [str(folder)], str(folder / "merged"))

    def next_command() -> str:
        command = ["python", "-m", "d1", "chat", str(folder)]
        if args.plain_chat_template:
            command.append("--plain_chat_template")
        return shlex.join(command)

    return Stage(
        training=training,
        settings=settings,
        on_resume=on_resume,
        prepare=prepare_run,
        conclude=conclude,
        next_command=next_command,
        **stage_fields,
    )


def trainer_arguments(
    args: TrainingSettings, *, ddp_timeout: int = TOKENISING_SECONDS, **stage_arguments: Any
) -> tuple[TrainingArguments, ModelFolder]:
    """The Trainer's arguments for the settings, and the model; `stage_arguments` are those of the stage. ValueError or
    FileNotFoundError if the folder, the device or the model cannot be used."""
    folder = Path(args.output_dir) / args.job_name
    check_output_dir(folder)
    if args.attn_implementation == "flex_attention" and not on_gpu():
        raise ValueError("--attn_implementation flex_attention trains on a GPU only: use sdpa or eager on a CPU")
    log_to_console()
    model = ModelFolder.read(args.model_name)  # what cannot be read is refused before the processes connect
    check_model_is_kept(folder, model)
    if args.bf16 is None:
        args.bf16 = str(on_gpu() or cpu_default_bf16(folder, args.resume, model)).lower()
    mixed = args.bf16 == "true"
    ddp_backend = None
    if os.environ.get("ACCELERATE_USE_DEEPSPEED", "").lower() == "true" and not on_gpu():
        ddp_backend = "gloo"  # without a GPU, Accelerate gives DeepSpeed no backend: every process would run alone
    stage_settings: Any = args  # each stage declares four of the settings below itself
    training = TrainingArguments(
        output_dir=str(folder),
        resume_from_checkpoint=args.resume,
        run_name=args.job_name,
        num_train_epochs=args.num_epochs,
        per_device_train_batch_size=args.batch_size,
        gradient_accumulation_steps=args.grad_accum_steps,
        bf16=mixed,
        use_cpu=mixed and not on_gpu(),  # else bf16 is refused there
        **{RECOMPUTE: args.gradient_checkpointing},  # type: ignore[arg-type]
        save_strategy="steps",
        save_total_limit=2,
        logging_nan_inf_filter=False,  # it would wait for the device to find losses that end the run anyway
        report_to="none" if args.debugging else args.report_to,
        ddp_find_unused_parameters=False,
        ddp_backend=ddp_backend,
        dataloader_pin_memory=on_gpu(),
        remove_unused_columns=False,
        max_steps=args.max_steps,
        learning_rate=stage_settings.learning_rate,
        weight_decay=stage_settings.weight_decay,
        max_grad_norm=args.max_grad_norm,
        lr_scheduler_type=stage_settings.lr_scheduler_type,
        warmup_steps=stage_settings.warmup_steps,
        seed=args.seed,
        logging_steps=args.logging_steps,
        ddp_timeout=ddp_timeout,
        **stage_arguments,
    )
    return training, model


def check_model_is_kept(output_dir: str | Path, model: ModelFolder) -> None:
    """Raise ValueError if the folder of a run is that of the model it starts from, of the model's base or of one of its
    adapters: the run would write over it. The run's folder `merged` is written anew at its end, too."""
    run_folder = Path(output_dir).resolve()
    for path in (model.path, model.base, *model.adapters):
        if Path(path).is_dir() and Path(path).resolve() in (run_folder, run_folder / "merged"):
            raise ValueError(
                f"{path} is the model that the run starts from, and the run might write over it: write to another "
                f"folder than {output_dir}"
            )


def cpu_default_bf16(folder: Path, resume: str | bool | None, model: ModelFolder) -> bool:
    """Whether a run without --bf16 computes in bf16 on this CPU: as the run that it continues did, by its record, else
    by a check of this processor, whose speed may differ from time to time."""
    if resume is not None and str(resume).lower() != "false":
        bf16 = read_history(checkpoint_to_resume(folder, resume)).settings.get("bf16")
        if bf16 is not None:
            return str(bf16).lower() == "true"
    return cpu_runs_bf16(model.config)


def on_gpu() -> bool:
    return torch.cuda.is_available() and os.environ.get("ACCELERATE_USE_CPU", "").lower() not in ("1", "true")


def cap_batch(training: TrainingArguments, rows: int) -> None:
    """Lower the rows per device to what an epoch has: more would be empty rows, which cost compute."""
    rows_per_device = -(-rows // training.world_size)
    training.per_device_train_batch_size = min(training.per_device_train_batch_size, rows_per_device)


def prepare_model(args: TrainingSettings, folder: ModelFolder, lora_dropout: float = 0.0) -> Any:
    """The model in `folder`, to train: all weights in fp32, or frozen weights in `--dtype` or 4 bits with an fp32 LoRA
    adapter. If the folder is itself an adapter, it is merged first."""
    if args.load_in_4bit and folder.adapters:
        todo = f"run `python -m d1 merge` on {args.model_name}"
        raise ValueError(f"an adapter cannot be merged into 4-bit weights: {todo}")
    dtype = "float32"
    if not args.full_finetuning:
        dtype = args.dtype or ("bfloat16" if on_gpu() else "float32")
    model: Any = load_model(
        folder,
        dtype=dtype,
        attn_implementation=args.attn_implementation,
        quantization="nf4" if args.load_in_4bit else None,
    )
    if isinstance(model, PeftModel):
        model = merge_adapter(model, args.model_name)
    if args.full_finetuning:
        return model
    lora_config = LoraConfig(
        r=args.lora_r,
        lora_alpha=args.lora_alpha,
        lora_dropout=lora_dropout,
        target_modules=lora_targets(model, args.lora_target_modules),
    )
    if args.load_in_4bit:
        model = prepare_model_for_kbit_training(model, use_gradient_checkpointing=False)
    return get_peft_model(model, lora_config)


# --- The lock of a folder, the processes, and the schedule after a resume ---------------------------------------------


@contextlib.contextmanager
def folder_lock(folder: Path, training: TrainingArguments) -> Iterator[None]:
    """Hold the lock of a run's folder: two runs would mix their metrics and delete each other's checkpoints. The first
    process takes it; all must call this. ValueError, in each of them, if another run holds it."""
    lock = FileLock(folder / ".lock")
    is_new_folder = not folder.exists()

    def acquire() -> None:
        folder.mkdir(parents=True, exist_ok=True)
        try:
            lock.acquire()
        except LockHeldError as holder:
            todo = "wait until that run ends, stop it, or choose another folder"
            raise ValueError(f"{holder} writes to {folder}: {todo}") from None

    from_rank_0(acquire)
    try:
        require_shared(folder / ".lock", "all machines of a run must share the folder that it writes to, --output_dir")
        yield
    finally:
        lock.release(remove=True)
        if is_new_folder and training.process_index == 0:
            with contextlib.suppress(OSError):  # nothing was written
                folder.rmdir()


def check_processes(world_size: int) -> None:
    """Refuse (ValueError) processes that are not connected, as `accelerate launch` starts them without a GPU: each
    would train the whole run. Refuse also a single process where several were asked for: its batch would be a part of
    the one that was asked for."""
    # With distributed_type NO and several processes, Accelerate (1.15, `prepare_simple_launcher_cmd_env`) starts one,
    # whose environment has the address of the first process and no number of processes.
    alone = "ACCELERATE_MIXED_PRECISION" in os.environ and "WORLD_SIZE" not in os.environ
    if alone and os.environ.get("MASTER_ADDR") == "127.0.0.1":
        raise ValueError(
            "accelerate launch was asked for several processes and started one, because its configuration has "
            "distributed_type NO: pass --num_processes 1; on GPUs take launch/ddp.yaml; on a CPU start "
            "`ACCELERATE_USE_CPU=true torchrun --nproc_per_node N` instead of `accelerate launch`; for one process, "
            "unset MASTER_ADDR if you have set it"
        )
    launched = int(os.environ.get("WORLD_SIZE", "1"))
    if launched != world_size:
        todo = "set ACCELERATE_USE_CPU=true to train with several processes on a CPU, or start a single one"
        raise ValueError(f"{launched} processes were started, but each would train alone: {todo}")


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
            scheduler.base_lrs = [args.learning_rate] * len(rates)
            scheduler._last_lr = rates
            for group, rate in zip(kwargs["optimizer"].param_groups, rates, strict=True):
                group["lr"] = rate
                group["initial_lr"] = args.learning_rate
        elif self.new_peak:
            raise ValueError(f"--learning_rate cannot change under --lr_scheduler_type {args.lr_scheduler_type}")
