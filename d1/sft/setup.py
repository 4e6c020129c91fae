"""Build the rows, the model and the trainer of an SFT run from its flags."""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from peft import LoraConfig, PeftModel, get_peft_model, prepare_model_for_kbit_training
from transformers import TrainingArguments, set_seed

from d1.models import load_model, load_tokenizer
from d1.models.adapters import adapter_chain, lora_targets, merge_adapter
from d1.models.convert import merge
from d1.models.kinds import block_size, check_room, native_config
from d1.models.tokenizer import check_chat_template
from d1.runs.record import OnResume, whole
from d1.runs.skeleton import Stage
from d1.sft.config import SFTConfig
from d1.sft.data import load_function, load_rows, preprocess_dataset
from d1.sft.trainer import dLLMDataCollator, dLLMSFTDataset, dLLMTrainer

ROWS_PER_STEP = "batch_size x grad_accum_steps x world_size"  # each factor may change if the product stays

# Settings that have the same name in Transformers' `TrainingArguments` and in `preprocess_dataset`
SAME_IN_TRAINER = (
    *("max_steps", "learning_rate", "weight_decay", "max_grad_norm", "lr_scheduler_type", "warmup_steps", "seed"),
    *("eval_steps", "logging_steps"),
)
SAME_IN_DATA = ("max_length", "test_split", "overlong", "bad_rows", "template", "num_proc", "seed")

ON_RESUME = OnResume(
    fixed=dict.fromkeys(
        (
            # The rows, their order, and the noise
            *("train_data", "template", "data_function", "plain_chat_template"),
            *("overlong", "bad_rows", "max_length", "eos_padding", "test_split", "eval_draws", "seed", ROWS_PER_STEP),
            # The weights in the checkpoint
            *("model_name", "full_finetuning", "lora_r", "lora_alpha", "lora_target_modules", "load_in_4bit"),
            # The state of its optimizer and scheduler, where a new value would have no effect
            *("weight_decay", "lr_scheduler_type"),
        ),
        whole,
    ),
    free=(
        *("output_dir", "job_name", "debugging", "resume", "num_proc", "logging_steps"),
        *("gradient_checkpointing", "merge_at_end"),
    ),
)


def stage(args: SFTConfig) -> Stage:
    """SFT as a `Stage` for `d1.runs.skeleton.run`."""
    check_device(args)
    training = training_arguments(args)
    rows = args.batch_size * args.grad_accum_steps * training.world_size
    return Stage(
        training=training,
        settings=lambda: {**vars(args), ROWS_PER_STEP: rows},
        on_resume=ON_RESUME,
        prepare=lambda: ({}, prepare(args, training)),
        conclude=lambda: conclude(args, Path(args.output_dir) / args.job_name),
    )


def prepare(args: SFTConfig, training: TrainingArguments) -> Callable[[], dLLMTrainer]:
    """Prepares and checks the rows of a run; returns a function that loads the model and makes the trainer."""
    tokenizer = load_tokenizer(args.model_name, plain_chat_template=args.plain_chat_template)
    check_chat_template(tokenizer, args.model_name)
    train_dataset, eval_dataset = load_data(args, training, tokenizer)
    check_lengths(args, [rows for rows in (train_dataset, eval_dataset) if rows is not None])

    def start() -> dLLMTrainer:
        set_seed(args.seed)  # LoRA's first weights are drawn before the Trainer sets the seed
        model = prepare_model(args)
        options: dict[str, Any] = {"complementary": args.complementary_masks, "packed": args.packing}
        collator = dLLMDataCollator(tokenizer, block_size=block_size(model.config), **options)
        return dLLMTrainer(
            model=model,
            args=training,
            data_collator=collator,
            train_dataset=train_dataset,
            eval_dataset=eval_dataset,
            processing_class=tokenizer,
        )

    return start


def conclude(args: SFTConfig, folder: Path) -> None:
    """Merges the adapter of a finished run, if `merge_at_end` is set."""
    if args.merge_at_end:
        shutil.rmtree(folder / "merged", ignore_errors=True)
        merge(args.model_name, [str(folder)], str(folder / "merged"))


def on_gpu() -> bool:
    return torch.cuda.is_available() and os.environ.get("ACCELERATE_USE_CPU", "").lower() not in ("1", "true")


def check_device(args: SFTConfig) -> None:
    """Refuses flags that only work on a GPU (ValueError)."""
    if on_gpu():
        return
    if args.load_in_4bit:  # on a CPU, an evaluation converts the weights to a format without gradients
        raise ValueError("--load_in_4bit needs a GPU: bitsandbytes does not train on a CPU")
    if args.attn_implementation == "flex_attention":
        raise ValueError("--attn_implementation flex_attention trains on a GPU only: use sdpa or eager on a CPU")


def training_arguments(args: SFTConfig) -> TrainingArguments:
    evaluate = args.test_split > 0
    deepspeed = os.environ.get("ACCELERATE_USE_DEEPSPEED", "").lower() == "true"
    return TrainingArguments(
        output_dir=str(Path(args.output_dir) / args.job_name),
        resume_from_checkpoint=args.resume,
        run_name=args.job_name,
        num_train_epochs=args.num_epochs,
        per_device_train_batch_size=args.batch_size,
        per_device_eval_batch_size=args.batch_size,
        gradient_accumulation_steps=args.grad_accum_steps,
        bf16=on_gpu(),
        activation_checkpointing=args.gradient_checkpointing,
        eval_strategy="steps" if evaluate else "no",
        eval_on_start=evaluate,
        save_strategy="steps",
        save_steps=args.eval_steps,
        save_total_limit=2,
        load_best_model_at_end=evaluate,
        metric_for_best_model="eval_loss" if evaluate else None,
        greater_is_better=False if evaluate else None,
        logging_nan_inf_filter=False,  # it would wait for the device to find losses that end the run anyway
        report_to="none" if args.debugging else "wandb",
        ddp_find_unused_parameters=False,
        # Without a GPU, Accelerate gives DeepSpeed no backend, and every process would run alone.
        ddp_backend="gloo" if deepspeed and not on_gpu() else None,
        dataloader_pin_memory=on_gpu(),
        remove_unused_columns=False,
        **{name: getattr(args, name) for name in SAME_IN_TRAINER},
    )


def load_data(
    args: SFTConfig, training: TrainingArguments, tokenizer: Any
) -> tuple[dLLMSFTDataset, dLLMSFTDataset | None]:
    """The training and the evaluation rows; the first process prepares them, the others read its cache."""
    with training.main_process_first(local=False, desc="tokenising"):
        data = load_rows(args.train_data)
        function = load_function(args.data_function) if args.data_function else None
        options: dict[str, Any] = {name: getattr(args, name) for name in SAME_IN_DATA}
        train, held_out = preprocess_dataset(data, tokenizer, function=function, **options)
    shared: dict[str, Any] = {"eos_padding": args.eos_padding, "seed": args.seed, "eval_draws": args.eval_draws}
    train_dataset = dLLMSFTDataset(train, tokenizer, args.max_length, **shared)
    if not args.test_split:
        return train_dataset, None
    return train_dataset, dLLMSFTDataset(held_out, tokenizer, args.max_length, eval=True, **shared)


def check_lengths(args: SFTConfig, datasets: Sequence[dLLMSFTDataset]) -> None:
    """Refuses rows with more tokens than the model has positions (ValueError), including the filling with EOS."""
    config, _ = native_config(adapter_chain(args.model_name, None)[0])
    filling = f": --eos_padding {args.eos_padding} fills rows; lower it or --max_length"
    check_room(config, max(max(rows.rows["length"]) for rows in datasets), 0, ": lower --max_length")
    check_room(config, max(max(rows.lengths) for rows in datasets), 0, filling)


def prepare_model(args: SFTConfig) -> Any:
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
    lora: dict[str, Any] = {"r": args.lora_r, "lora_alpha": args.lora_alpha, "lora_dropout": args.lora_dropout}
    return get_peft_model(model, LoraConfig(**lora, target_modules=targets))
