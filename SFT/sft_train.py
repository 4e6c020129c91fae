"""Masked supervised fine-tuning of a diffusion language model.

    accelerate launch --config_file ddp_config.yaml --num_processes 2 sft_train.py \\
        --grad_accum_steps 4 --batch_size 1 --num_epochs 20

The fine-tuned model (or its LoRA adapter) is saved to OUTPUT_DIR/JOB_NAME, which diffu_grpo_train.py and eval.py take
as a model path; so are the checkpoints, the logged losses and a plot of them.
"""

from __future__ import annotations

import argparse
import json
import logging
import os
from pathlib import Path
from typing import Any

import torch
from accelerate import PartialState
from peft import LoraConfig, get_peft_model
from sft_data import choose_columns, load_function, load_rows, preprocess_dataset
from sft_trainer import dLLMDataCollator, dLLMSFTDataset, dLLMTrainer
from transformers import EarlyStoppingCallback, TrainingArguments

from d1.models import load_model, load_tokenizer

logger = logging.getLogger(__name__)


def make_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add = parser.add_argument
    # Flags and defaults of d1.
    add("--model_name", default="GSAI-ML/LLaDA-8B-Instruct", help="folder or hub name of the model to fine-tune")
    add("--batch_size", type=int, default=1, help="rows a device and micro-batch")
    add("--max_length", type=int, default=4096, help="tokens of a row, prompt and answer, at most")
    add("--num_epochs", type=float, default=20)
    add("--learning_rate", type=float, default=1e-5)
    add("--grad_accum_steps", type=int, default=4)
    add("--output_dir", default="runs", help="everything is written to OUTPUT_DIR/JOB_NAME")
    add("--job_name", default="llada-s1")
    add("--train_data", default="simplescaling/s1K", help="hub name, or a .json, .jsonl, .parquet or .csv file")
    add("--debugging", action="store_true", help="turn experiment logging (Weights & Biases) off")
    # Data.
    add("--prompt_column", help="column with the prompt; with --completion_column, any data of two text columns")
    add("--completion_column")
    add(
        "--template",
        nargs=2,
        metavar=("PROMPT", "COMPLETION"),
        help="two format strings with {column} fields, e.g. '{instruction}\\n{input}' '{output}'",
    )
    add("--data_function", metavar="FILE.py:FUNCTION", help="turns a row into messages, or prompt and completion")
    add("--train_on", choices=("last", "all"), default="last", help="the last assistant turn, or all of them")
    add("--overlong", choices=("truncate", "drop", "refuse"), default="truncate", help="rows over --max_length")
    add("--bad_rows", choices=("error", "skip"), default="error", help="rows that cannot be trained on")
    add("--test_split", type=float, default=0.01, help="share of the rows held out for the evaluation loss")
    add("--num_proc", type=int, help="processes that tokenise (default: one a core)")
    add(
        "--eos_padding",
        type=eos_padding,
        default="batch",
        metavar="N|batch|max",
        help="EOS after the answer that is trained on, where a model learns to stop: at least N answer tokens, EOS "
        "included; to the longest row of the global batch; or to --max_length, as d1 does",
    )
    add("--group_by_length", action="store_true", help="batches of rows of like length: less padding")
    # Model and precision.
    add("--full_finetuning", action="store_true", help="train all weights instead of a LoRA adapter")
    add("--lora_r", type=int, default=128)
    add("--lora_alpha", type=int, default=256)
    add("--lora_dropout", type=float, default=0.05)
    add("--lora_target_modules", nargs="+", default=["q_proj", "k_proj", "v_proj"])
    add("--dtype", choices=("float32", "bfloat16"), help="of frozen weights (default: bfloat16 on a GPU)")
    add("--gradient_checkpointing", action="store_true", help="less memory, a third more time")
    add("--merge_at_end", action="store_true", help="also save the model with its adapter merged, to .../merged")
    # Training.
    add("--seed", type=int, default=42)
    add("--max_steps", type=int, default=-1, help="stop after so many optimizer steps")
    add("--weight_decay", type=float, default=0.1)
    add("--max_grad_norm", type=float, default=1.0)
    add("--lr_scheduler_type", default="linear")
    add("--warmup_steps", type=float, default=0, help="steps, or a share of all if below 1")
    add("--stratified_t", action="store_true", help="the times of a global batch share [0, 1] out evenly")
    add("--antithetic_masks", action="store_true", help="each row twice a batch, with complementary masks")
    add("--eval_steps", type=int, default=100, help="steps between evaluations, each followed by a checkpoint")
    add("--eval_draws", type=int, default=4, help="times and masks each held-out row is evaluated with")
    add("--early_stop", type=int, help="stop after so many evaluations without a better loss")
    add("--logging_steps", type=int, default=10)
    add("--resume", action="store_true", help="continue from the last complete checkpoint, if there is one")
    return parser


def eos_padding(text: str) -> int | str:
    if text in ("batch", "max"):
        return text
    if not text.isdigit():
        raise argparse.ArgumentTypeError(f"expected a number of answer tokens, 'batch' or 'max', got {text!r}")
    return int(text)


def last_checkpoint(folder: Path) -> str | None:
    """The latest checkpoint of a folder whose writing was finished: its state is written last."""
    complete = []
    for checkpoint in folder.glob("checkpoint-*"):
        try:
            complete.append((json.loads((checkpoint / "trainer_state.json").read_text())["global_step"], checkpoint))
        except (OSError, ValueError):
            logger.warning("%s is not complete: left alone", checkpoint)
    return str(max(complete)[1]) if complete else None


def check_arguments(args: argparse.Namespace, folder: Path) -> None:
    """Refuses what cannot work, before anything is loaded.

    Raises:
        ValueError: says which flags, and what to use instead.
    """
    if bool(args.prompt_column) != bool(args.completion_column):
        raise ValueError("--prompt_column and --completion_column need each other")
    if sum(map(bool, (args.prompt_column, args.template, args.data_function))) > 1:
        raise ValueError("use one of --prompt_column/--completion_column, --template and --data_function")
    if args.merge_at_end and args.full_finetuning:
        raise ValueError("--merge_at_end merges a LoRA adapter: there is none with --full_finetuning")
    if args.early_stop and not args.test_split:
        raise ValueError("--early_stop watches the evaluation loss: hold rows out with --test_split")
    if not args.resume and any(folder.glob("checkpoint-*")):
        raise ValueError(f"{folder} holds checkpoints: continue with --resume, or choose another --job_name")


def load_data(args: argparse.Namespace, tokenizer: Any) -> tuple[dLLMSFTDataset, dLLMSFTDataset | None]:
    """The training and the evaluation rows; the first process prepares them, the others read its cache."""
    with PartialState().main_process_first():
        data = load_rows(args.train_data)
        if args.prompt_column:
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
    shared = {"eos_padding": args.eos_padding, "seed": args.seed, "eval_draws": args.eval_draws}
    train_dataset = dLLMSFTDataset(train, tokenizer, args.max_length, **shared)
    if not len(held_out):
        return train_dataset, None
    return train_dataset, dLLMSFTDataset(held_out, tokenizer, args.max_length, eval=True, **shared)


def prepare_model(args: argparse.Namespace) -> Any:
    """The model to train: all of it in fp32, or frozen in `--dtype` with an fp32 LoRA adapter."""
    frozen = getattr(torch, args.dtype) if args.dtype else torch.bfloat16 if on_gpu() else torch.float32
    model = load_model(args.model_name, dtype=torch.float32 if args.full_finetuning else frozen)
    if args.full_finetuning:
        return model
    config = LoraConfig(
        r=args.lora_r,
        lora_alpha=args.lora_alpha,
        lora_dropout=args.lora_dropout,
        target_modules=args.lora_target_modules,
        task_type="CAUSAL_LM",
    )
    return get_peft_model(model, config)


def on_gpu() -> bool:
    return PartialState().device.type == "cuda"


def training_arguments(args: argparse.Namespace, folder: Path, evaluate: bool) -> TrainingArguments:
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
        eval_on_start=evaluate and not args.resume,
        save_strategy="steps",
        save_steps=args.eval_steps,
        save_total_limit=2,
        load_best_model_at_end=evaluate,
        metric_for_best_model="eval_loss" if evaluate else None,
        greater_is_better=False if evaluate else None,
        logging_steps=args.logging_steps,
        report_to="none" if args.debugging else "wandb",
        ddp_find_unused_parameters=False,
        remove_unused_columns=False,
        seed=args.seed,
    )


def log_without_account() -> None:
    """Weights & Biases logs to local files where no account is set up, instead of asking for one."""
    import wandb

    if "WANDB_MODE" not in os.environ and not wandb.login(prompt=False):
        os.environ["WANDB_MODE"] = "offline"


def main(args: argparse.Namespace) -> dLLMTrainer:
    folder = Path(args.output_dir) / args.job_name
    check_arguments(args, folder)
    if not args.debugging:
        log_without_account()
    tokenizer = load_tokenizer(args.model_name)
    train_dataset, eval_dataset = load_data(args, tokenizer)
    trainer = dLLMTrainer(
        model=prepare_model(args),
        args=training_arguments(args, folder, evaluate=eval_dataset is not None),
        data_collator=dLLMDataCollator(tokenizer),
        train_dataset=train_dataset,
        eval_dataset=eval_dataset,
        processing_class=tokenizer,
        callbacks=[EarlyStoppingCallback(args.early_stop)] if args.early_stop else None,
        stratified_t=args.stratified_t,
        antithetic_masks=args.antithetic_masks,
        group_by_length=args.group_by_length,
    )
    trainer.train(resume_from_checkpoint=last_checkpoint(folder) if args.resume else None)
    if eval_dataset is not None:
        trainer.evaluate()
    trainer.save_model()
    trainer.save_state()
    trainer.end()
    return trainer


if __name__ == "__main__":
    logging.basicConfig(level=logging.INFO)
    main(make_parser().parse_args())
