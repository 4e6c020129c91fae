"""Masked supervised fine-tuning of a diffusion language model.

    accelerate launch --config_file ddp_config.yaml --num_processes 2 sft_train.py \\
        --grad_accum_steps 4 --batch_size 1 --num_epochs 20

The fine-tuned model (or its LoRA adapter) is saved to OUTPUT_DIR/JOB_NAME, which diffu_grpo_train.py and eval.py take
as a model path; so are the checkpoints, the logged losses and a plot of them.
"""

from __future__ import annotations

import argparse
import logging
import os
import shutil
from pathlib import Path
from typing import Any

import matplotlib
import torch
from peft import LoraConfig, PeftModel, get_peft_model, prepare_model_for_kbit_training
from sft_data import choose_columns, load_function, load_rows, preprocess_dataset
from sft_trainer import dLLMDataCollator, dLLMSFTDataset, dLLMTrainer
from transformers import EarlyStoppingCallback, TrainerState, TrainingArguments, set_seed
from transformers.trainer_utils import get_last_checkpoint

from d1.models import load_model, load_tokenizer
from d1.models.adapters import adapter_chain, lora_targets, merge_adapter
from d1.models.convert import merge
from d1.models.kinds import native_config
from d1.models.tokenizer import check_chat_template
from d1.runs.checkpoints import copy_model, is_finished
from d1.runs.processes import check_processes, leave
from d1.runs.record import log_without_account, save_record

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
        help="two format strings with {column} fields, e.g. '{instruction} {input}' '{output}' ($'...' for newlines)",
    )
    add("--data_function", metavar="FILE.py:FUNCTION", help="turns a row into messages, or prompt and completion")
    add("--plain_chat_template", action="store_true", help="give a tokenizer that has no chat template a plain one")
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
    add(
        "--lora_target_modules",
        nargs="+",
        default=["q_proj", "k_proj", "v_proj"],
        help="names of modules, or 'attention' or 'all-linear' for those of the model's kind",
    )
    add("--load_in_4bit", action="store_true", help="QLoRA: frozen weights in 4-bit NF4 (needs bitsandbytes)")
    add("--dtype", choices=("float32", "bfloat16"), help="of frozen weights (default: bfloat16 on a GPU)")
    add("--attn_implementation", help="sdpa, eager or flash_attention_2 (default: Transformers chooses)")
    add("--gradient_checkpointing", action="store_true", help="less memory, a third more time")
    add("--merge_at_end", action="store_true", help="also save the model with its adapter merged, to .../merged")
    # Training.
    add("--seed", type=int, default=42)
    add("--max_steps", type=int, default=-1, help="stop after so many optimizer steps")
    add("--weight_decay", type=float, default=0.1)
    add("--max_grad_norm", type=float, default=1.0)
    add("--lr_scheduler_type", default="linear")
    add("--warmup_steps", type=float, default=0, help="steps, or a share of all if below 1")
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


def check_arguments(args: argparse.Namespace, folder: Path) -> str | None:
    """Refuses what cannot work, before anything is loaded; returns the checkpoint to continue from.

    Raises:
        ValueError: says which flags, and what to use instead.
    """
    counts = ("batch_size", "grad_accum_steps", "max_length", "eval_draws", "eval_steps", "logging_steps", "early_stop")
    for name in counts:
        if (value := getattr(args, name)) is not None and value < 1:
            raise ValueError(f"--{name} must be at least 1, got {value}")
    if bool(args.prompt_column) != bool(args.completion_column):
        raise ValueError("--prompt_column and --completion_column need each other")
    if sum(map(bool, (args.prompt_column, args.template, args.data_function))) > 1:
        raise ValueError("use one of --prompt_column/--completion_column, --template and --data_function")
    if args.full_finetuning and (args.merge_at_end or args.load_in_4bit):
        raise ValueError("--merge_at_end and --load_in_4bit are for LoRA: leave --full_finetuning out")
    if args.load_in_4bit and not on_gpu():  # on a CPU, an evaluation turns its weights into a form without gradients
        raise ValueError("--load_in_4bit needs a GPU: bitsandbytes does not train on a CPU")
    if args.num_epochs <= 0:
        raise ValueError(f"--num_epochs must be positive, got {args.num_epochs}")
    if args.early_stop and not args.test_split:
        raise ValueError("--early_stop watches the evaluation loss: hold rows out with --test_split")
    checkpoint = get_last_checkpoint(str(folder)) if folder.is_dir() else None
    if checkpoint and not args.resume:
        raise ValueError(f"{folder} holds checkpoints: continue with --resume, or choose another --job_name")
    return checkpoint


def on_gpu() -> bool:
    return torch.cuda.is_available() and os.environ.get("ACCELERATE_USE_CPU", "").lower() not in ("1", "true")


def training_arguments(args: argparse.Namespace, folder: Path, fresh: bool) -> TrainingArguments:
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
        restore_callback_states_from_checkpoint=args.early_stop is not None,
        report_to="none" if args.debugging else "wandb",
        ddp_find_unused_parameters=False,
        # Without a GPU, Accelerate gives DeepSpeed no backend and every process then thinks it is alone.
        ddp_backend="gloo" if deepspeed and not on_gpu() else None,
        dataloader_pin_memory=on_gpu(),
        remove_unused_columns=False,
        seed=args.seed,
    )


def is_out_of_patience(checkpoint: str, patience: int | None) -> bool:
    """Whether a run stopped early at `checkpoint`."""
    stopping = TrainerState.load_from_json(f"{checkpoint}/trainer_state.json").stateful_callbacks or {}
    counter = stopping.get("EarlyStoppingCallback", {}).get("attributes", {}).get("early_stopping_patience_counter", 0)
    return patience is not None and counter >= patience


def load_data(
    args: argparse.Namespace, training: TrainingArguments, tokenizer: Any
) -> tuple[dLLMSFTDataset, dLLMSFTDataset | None]:
    """The training and the evaluation rows; the first process prepares them, the others read its cache."""
    with training.main_process_first(local=False, desc="tokenising"):
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
    if not args.test_split:
        return train_dataset, None
    return train_dataset, dLLMSFTDataset(held_out, tokenizer, args.max_length, eval=True, **shared)


def check_room(model_name: str, longest: int) -> None:
    """Raises ValueError where a row has more tokens than the model has positions."""
    config, _ = native_config(adapter_chain(model_name, None)[0])
    room = config.max_position_embeddings
    if longest > room:
        raise ValueError(f"a row has {longest} tokens and {model_name} {room} positions: lower --max_length")


def prepare_model(args: argparse.Namespace) -> Any:
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
    targets = args.lora_target_modules
    if targets[0] in ("attention", "all-linear"):
        targets = lora_targets(model.config.model_type, targets[0])
    if args.load_in_4bit:
        model = prepare_model_for_kbit_training(model, use_gradient_checkpointing=False)
    config = LoraConfig(
        r=args.lora_r,
        lora_alpha=args.lora_alpha,
        lora_dropout=args.lora_dropout,
        target_modules=targets,
    )
    try:
        return get_peft_model(model, config)
    except ValueError as error:  # PEFT knows no more than that a name is not there
        raise ValueError(f"{error} (--lora_target_modules attention has the names of every kind of model)") from error


def plot_losses(history: list[dict[str, float]], path: Path) -> None:
    """Training and evaluation loss, and the latter's bands of t, against optimizer steps."""
    matplotlib.use("Agg")
    from matplotlib import pyplot

    names = sorted({key for entry in history for key in entry if key == "loss" or key.startswith("eval_loss")})
    figure, axes = pyplot.subplots(figsize=(8, 5))
    for name in names:
        points = [(entry["step"], entry[name]) for entry in history if name in entry]
        label = {"loss": "training", "eval_loss": "evaluation"}.get(name, name.replace("eval_loss_t", "evaluation, t "))
        axes.plot(*zip(*points, strict=True), label=label, lw=2 if name in ("loss", "eval_loss") else 1, marker=".")
    axes.set(xlabel="optimizer step", ylabel="cross-entropy / t', nats an answer token", title="Masked SFT")
    axes.legend()
    figure.savefig(path, dpi=150, bbox_inches="tight")
    pyplot.close(figure)


def main(args: argparse.Namespace) -> dLLMTrainer:
    folder = Path(args.output_dir) / args.job_name
    checkpoint = check_arguments(args, folder)
    training = training_arguments(args, folder, fresh=checkpoint is None)
    check_processes(training.world_size)
    set_seed(args.seed)  # LoRA's first weights are drawn before the Trainer seeds itself
    tokenizer = load_tokenizer(args.model_name, plain_chat_template=args.plain_chat_template)
    check_chat_template(tokenizer, args.model_name)
    train_dataset, eval_dataset = load_data(args, training, tokenizer)
    check_room(args.model_name, max(train_dataset.lengths))
    if training.should_save:
        launched = {"world_size": training.world_size, "distributed_type": training.distributed_state.distributed_type}
        save_record(str(folder), "run.json", vars(args) | launched)
        if not args.debugging:
            log_without_account(folder)
    trainer = dLLMTrainer(
        model=prepare_model(args),
        args=training,
        data_collator=dLLMDataCollator(tokenizer),
        train_dataset=train_dataset,
        eval_dataset=eval_dataset,
        processing_class=tokenizer,
        callbacks=[EarlyStoppingCallback(args.early_stop)] if args.early_stop else None,
        group_by_length=args.group_by_length,
    )
    if checkpoint and (is_finished(checkpoint, training) or is_out_of_patience(checkpoint, args.early_stop)):
        # Only what comes after training is left to do.
        trainer.state = TrainerState.load_from_json(f"{checkpoint}/trainer_state.json")
        if training.should_save:
            copy_model(trainer.state.best_model_checkpoint or checkpoint, folder)
    else:
        trainer.train(resume_from_checkpoint=checkpoint)
        trainer.save_model()
    trainer.save_state()
    if trainer.is_world_process_zero():
        plot_losses(trainer.state.log_history, folder / "losses.png")
        if args.merge_at_end:
            shutil.rmtree(folder / "merged", ignore_errors=True)
            merge(args.model_name, [str(folder)], str(folder / "merged"))
    trainer.end()
    return trainer


if __name__ == "__main__":
    logging.basicConfig(level=logging.INFO, format="%(message)s")
    main(make_parser().parse_args())
    leave()
