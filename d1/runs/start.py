"""What SFT, preference training and distillation make of the settings they share: model, Trainer's arguments, merge."""

from __future__ import annotations

import os
import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from peft import LoraConfig, PeftModel, get_peft_model, prepare_model_for_kbit_training
from transformers import TrainingArguments

from d1.models import load_model
from d1.models.adapters import lora_targets, merge_adapter
from d1.models.convert import merge
from d1.runs.preflight import check_start
from d1.runs.record import OnResume, whole
from d1.runs.training_settings import TrainingSettings

# Settings that Transformers' `TrainingArguments` know by the same name
SAME_IN_TRAINER = (
    *("max_steps", "learning_rate", "weight_decay", "max_grad_norm", "lr_scheduler_type", "warmup_steps", "seed"),
    *("logging_steps",),
)
ROWS_PER_STEP = "batch_size x grad_accum_steps x world_size"  # each factor may change if the product stays
FIXED = (  # on a resume; each stage adds its own
    *("train_data", "plain_chat_template", "bad_rows", "seed", ROWS_PER_STEP),
    # The weights in the checkpoint
    *("model_name", "full_finetuning", "lora_r", "lora_alpha", "lora_target_modules", "load_in_4bit"),
    # The state of its optimizer and scheduler, where a new value would have no effect
    *("weight_decay", "lr_scheduler_type"),
)
FREE = (
    *("output_dir", "job_name", "debugging", "report_to", "resume", "num_proc", "logging_steps"),
    *("gradient_checkpointing", "merge_at_end"),
)


def on_resume(*fixed: str, free: Sequence[str] = ()) -> OnResume:
    """What may change on a resume: `fixed` and `free` are the settings of one stage alone."""
    return OnResume(dict.fromkeys((*FIXED, *fixed), whole), (*FREE, *free))


def settings_of_run(args: TrainingSettings, training: TrainingArguments) -> dict[str, Any]:
    """All settings, and the rows per optimizer step."""
    return {**vars(args), ROWS_PER_STEP: args.batch_size * args.grad_accum_steps * training.world_size}


def on_gpu() -> bool:
    return torch.cuda.is_available() and os.environ.get("ACCELERATE_USE_CPU", "").lower() not in ("1", "true")


def check_device(args: TrainingSettings) -> None:
    """Refuses flags that only work on a GPU (ValueError)."""
    if on_gpu():
        return
    if args.load_in_4bit:  # on a CPU, an evaluation converts the weights to a format without gradients
        raise ValueError("--load_in_4bit needs a GPU: bitsandbytes does not train on a CPU")
    if args.attn_implementation == "flex_attention":
        raise ValueError("--attn_implementation flex_attention trains on a GPU only: use sdpa or eager on a CPU")


def trainer_arguments(args: TrainingSettings, **more: Any) -> TrainingArguments:
    """The Trainer's arguments for the settings; `more` are those of the stage."""
    check_start(args.model_name)
    deepspeed = os.environ.get("ACCELERATE_USE_DEEPSPEED", "").lower() == "true"
    return TrainingArguments(
        output_dir=str(Path(args.output_dir) / args.job_name),
        resume_from_checkpoint=args.resume,
        run_name=args.job_name,
        num_train_epochs=args.num_epochs,
        per_device_train_batch_size=args.batch_size,
        gradient_accumulation_steps=args.grad_accum_steps,
        bf16=on_gpu(),
        activation_checkpointing=args.gradient_checkpointing,
        save_strategy="steps",
        save_total_limit=2,
        logging_nan_inf_filter=False,  # it would wait for the device to find losses that end the run anyway
        report_to="none" if args.debugging else args.report_to,
        ddp_find_unused_parameters=False,
        # Without a GPU, Accelerate gives DeepSpeed no backend, and every process would run alone.
        ddp_backend="gloo" if deepspeed and not on_gpu() else None,
        dataloader_pin_memory=on_gpu(),
        remove_unused_columns=False,
        **{name: getattr(args, name) for name in SAME_IN_TRAINER},
        **more,
    )


def cap_batch(training: TrainingArguments, rows: int) -> None:
    """Lower the rows per device to what an epoch has: more would be empty slots, which are computed, too."""
    most = -(-rows // training.world_size)
    training.per_device_train_batch_size = min(training.per_device_train_batch_size, most)


def conclude(args: TrainingSettings) -> None:
    """Merges the adapter of a finished run, if `merge_at_end` is set."""
    if args.merge_at_end:
        folder = Path(args.output_dir) / args.job_name
        shutil.rmtree(folder / "merged", ignore_errors=True)
        merge(args.model_name, [str(folder)], str(folder / "merged"))


def prepare_model(args: TrainingSettings, dropout: float = 0.0) -> Any:
    """The model to train: all weights in fp32, or frozen weights in `--dtype` or 4 bits with an fp32 LoRA adapter.

    If the model path is itself an adapter, it is merged first, and training starts from the merged model.
    """
    frozen = args.dtype or ("bfloat16" if on_gpu() else "float32")
    model: Any = load_model(
        args.model_name,
        dtype="float32" if args.full_finetuning else frozen,
        attn_implementation=args.attn_implementation,
        quantization="nf4" if args.load_in_4bit else None,
    )
    if isinstance(model, PeftModel):
        if args.load_in_4bit:
            raise ValueError(
                f"an adapter cannot be merged into 4-bit weights: run `python -m d1 merge` on {args.model_name}"
            )
        model = merge_adapter(model, args.model_name)
    if args.full_finetuning:
        return model
    targets = lora_targets(model, args.lora_target_modules)
    if args.load_in_4bit:
        model = prepare_model_for_kbit_training(model, use_gradient_checkpointing=False)
    lora: dict[str, Any] = {"r": args.lora_r, "lora_alpha": args.lora_alpha, "lora_dropout": dropout}
    return get_peft_model(model, LoraConfig(**lora, target_modules=targets))
