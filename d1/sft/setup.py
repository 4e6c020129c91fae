"""What sft_train.py trains with, made from its flags: the Trainer's arguments, the rows, the model."""

from __future__ import annotations

import json
import math
import os
from pathlib import Path
from typing import Any

import torch
from peft import LoraConfig, PeftModel, get_peft_model, prepare_model_for_kbit_training
from transformers import TrainerState, TrainingArguments

from d1.models import load_model
from d1.models.adapters import adapter_chain, lora_targets, merge_adapter
from d1.models.kinds import native_config
from d1.sft.config import SFTConfig
from d1.sft.data import choose_columns, load_function, load_rows, preprocess_dataset
from d1.sft.trainer import dLLMSFTDataset


def on_gpu() -> bool:
    return torch.cuda.is_available() and os.environ.get("ACCELERATE_USE_CPU", "").lower() not in ("1", "true")


def check_device(args: SFTConfig) -> None:
    if args.load_in_4bit and not on_gpu():  # on a CPU, an evaluation turns its weights into a form without gradients
        raise ValueError("--load_in_4bit needs a GPU: bitsandbytes does not train on a CPU")


def training_arguments(args: SFTConfig, folder: Path, fresh: bool) -> TrainingArguments:
    evaluate = args.test_split > 0
    deepspeed = os.environ.get("ACCELERATE_USE_DEEPSPEED", "").lower() == "true"
    return TrainingArguments(
        output_dir=str(folder),
        run_name=args.job_name,
        num_train_epochs=args.num_epochs,
        max_steps=args.max_steps,
        per_device_train_batch_size=args.batch_size,
        per_device_eval_batch_size=args.batch_size,
        gradient_accumulation_steps=args.grad_accum_steps,
        learning_rate=args.learning_rate,
        weight_decay=args.weight_decay,
        max_grad_norm=args.max_grad_norm,
        lr_scheduler_type=args.lr_scheduler_type,
        warmup_steps=args.warmup_steps,
        bf16=on_gpu(),
        activation_checkpointing=args.gradient_checkpointing,
        eval_strategy="steps" if evaluate else "no",
        eval_steps=args.eval_steps,
        eval_on_start=evaluate and fresh,
        save_strategy="steps",
        save_steps=args.eval_steps,
        save_total_limit=2,
        load_best_model_at_end=evaluate,
        metric_for_best_model="eval_loss" if evaluate else None,
        greater_is_better=False if evaluate else None,
        logging_steps=args.logging_steps,
        logging_nan_inf_filter=False,  # it would wait for the device to look for what ends the run anyway
        restore_callback_states_from_checkpoint=args.early_stop is not None,
        report_to="none" if args.debugging else "wandb",
        ddp_find_unused_parameters=False,
        # Without a GPU, Accelerate gives DeepSpeed no backend and every process then thinks it is alone.
        ddp_backend="gloo" if deepspeed and not on_gpu() else None,
        dataloader_pin_memory=on_gpu(),
        remove_unused_columns=False,
        push_to_hub=args.push_to_hub,
        hub_model_id=args.hub_model_id,
        hub_private_repo=args.hub_private_repo or None,  # None: as the account has it
        seed=args.seed,
    )


def is_out_of_patience(checkpoint: str, patience: int | None) -> bool:
    """Whether a run stopped early at `checkpoint`."""
    stopping = TrainerState.load_from_json(f"{checkpoint}/trainer_state.json").stateful_callbacks or {}
    counter = stopping.get("EarlyStoppingCallback", {}).get("attributes", {}).get("early_stopping_patience_counter", 0)
    return patience is not None and counter >= patience


def check_step_rows(checkpoint: str, training: TrainingArguments) -> None:
    """Refuses steps of another number of rows than those before `checkpoint`, which would miscount the rows seen."""
    record = Path(checkpoint).parent / "run.json"
    before = json.loads(record.read_text())["settings"] if record.exists() else {}
    parts = ("batch_size", "grad_accum_steps", "world_size")
    if any(name not in before for name in parts):
        return
    now = training.per_device_train_batch_size, training.gradient_accumulation_steps, training.world_size
    rows = math.prod(before[name] for name in parts)
    if math.prod(now) != rows:
        raise ValueError(
            f"{checkpoint} was trained with {rows} rows a step and cannot go on with {math.prod(now)} "
            f"(--batch_size {now[0]} x --grad_accum_steps {now[1]} x {now[2]} processes): choose these to make {rows}"
        )


def load_data(
    args: SFTConfig, training: TrainingArguments, tokenizer: Any
) -> tuple[dLLMSFTDataset, dLLMSFTDataset | None]:
    """The training and the evaluation rows; the first process prepares them, the others read its cache."""
    with training.main_process_first(local=False, desc="tokenising"):
        data = load_rows(args.train_data)
        if args.prompt_column and args.completion_column:
            data = choose_columns(data, args.prompt_column, args.completion_column)
        train, held_out = preprocess_dataset(
            data,
            tokenizer,
            args.max_length,
            args.test_split,
            overlong=args.overlong,
            bad_rows=args.bad_rows,
            train_on=args.train_on,
            function=load_function(args.data_function) if args.data_function else None,
            template=args.template,
            num_proc=args.num_proc,
            seed=args.seed,
        )
    shared: dict[str, Any] = {"eos_padding": args.eos_padding, "seed": args.seed, "eval_draws": args.eval_draws}
    train_dataset = dLLMSFTDataset(train, tokenizer, args.max_length, **shared)
    if not args.test_split:
        return train_dataset, None
    return train_dataset, dLLMSFTDataset(held_out, tokenizer, args.max_length, eval=True, **shared)


def check_room(model_name: str, longest: int) -> None:
    """Raises ValueError where a row has more tokens than the model has positions."""
    config, _ = native_config(adapter_chain(model_name, None)[0])
    room = config.max_position_embeddings
    if longest > room:
        raise ValueError(f"a row has {longest} tokens and {model_name} {room} positions: lower --max_length")


def prepare_model(args: SFTConfig) -> Any:
    """The model to train: all of it in fp32, or frozen in `--dtype` or 4 bits with an fp32 LoRA adapter.

    A model path that is itself an adapter is merged first: training goes on from the model it makes.
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
            raise ValueError(f"4-bit weights take no merged adapter: run `python -m d1 merge` on {args.model_name}")
        model = merge_adapter(model, args.model_name)
    if args.full_finetuning:
        return model
    targets = lora_targets(model, args.lora_target_modules)
    if args.load_in_4bit:
        model = prepare_model_for_kbit_training(model, use_gradient_checkpointing=False)
    config = LoraConfig(
        r=args.lora_r,
        lora_alpha=args.lora_alpha,
        lora_dropout=args.lora_dropout,
        target_modules=targets,
    )
    return get_peft_model(model, config)
