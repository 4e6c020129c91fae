"""Masked supervised fine-tuning of a diffusion language model.

    accelerate launch --config_file SFT/ddp_config.yaml --num_processes 2 -m d1.sft.train \\
        --grad_accum_steps 4 --batch_size 1 --num_epochs 20

The fine-tuned model (or its LoRA adapter) is saved to OUTPUT_DIR/JOB_NAME, which diffu_grpo_train.py and eval.py take
as a model path; so are the checkpoints, the logged losses and a plot of them.
"""

from __future__ import annotations

import argparse
import logging
import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, NoReturn

from d1.runs.entry import OneLineParser, quick_imports, run_script
from d1.runs.output_dir import check_output_dir, writing
from d1.runs.ranges import check_ranges

if TYPE_CHECKING:
    from d1.sft.trainer import dLLMTrainer

# Settings that a model card has elsewhere, or that made no difference to the model.
NOT_OF_THE_METHOD = (
    *("output_dir", "job_name", "model_name", "train_data", "debugging", "resume", "num_proc", "logging_steps"),
    *("push_to_hub", "hub_model_id", "hub_private_repo"),
)


def make_parser(prog: str | None = None) -> argparse.ArgumentParser:
    parser = OneLineParser(prog, description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add = parser.add_argument
    # Flags and defaults of d1.
    add(
        "--model_name",
        "--model_path",
        default="GSAI-ML/LLaDA-8B-Instruct",
        help="folder or hub name of the model to fine-tune",
    )
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
    add(
        "--packing",
        action="store_true",
        help="the rows of a micro-batch one behind the other as one row, each attending to itself alone: no padding",
    )
    add(
        "--complementary_masks",
        action="store_true",
        help="each row twice a batch, once with the opposite mask: every answer token is learned from each time",
    )
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
    add(
        "--resume",
        "--resume_from_checkpoint",
        nargs="?",
        const="true",
        metavar="true|false|FOLDER",
        help="continue from the last complete checkpoint, if there is one, or from the one named",
    )
    add("--push_to_hub", action="store_true", help="upload the model when all is done")
    add("--hub_model_id", help="its name on the hub (default: JOB_NAME, under your account)")
    add("--hub_private_repo", action="store_true", help="whether others may not see it")
    return parser


def eos_padding(text: str) -> int | str:
    if text in ("batch", "max"):
        return text
    if not text.isdigit():
        raise argparse.ArgumentTypeError(f"expected a number of answer tokens, 'batch' or 'max', got {text!r}")
    return int(text)


def check_flags_agree(args: argparse.Namespace) -> None:
    """Refuses flags that contradict each other.

    Raises:
        ValueError: says which, and what to use instead.
    """
    if bool(args.prompt_column) != bool(args.completion_column):
        raise ValueError("--prompt_column and --completion_column need each other")
    if sum(map(bool, (args.prompt_column, args.template, args.data_function))) > 1:
        raise ValueError("use one of --prompt_column/--completion_column, --template and --data_function")
    if args.full_finetuning and (args.merge_at_end or args.load_in_4bit):
        raise ValueError("--merge_at_end and --load_in_4bit are for LoRA: leave --full_finetuning out")
    if args.early_stop and not args.test_split:
        raise ValueError("--early_stop watches the evaluation loss: hold rows out with --test_split")


def main(args: argparse.Namespace) -> dLLMTrainer:
    """Trains, and saves the model, the Trainer's state and the plot of the losses.

    Raises:
        ValueError, OSError: a flag, a file or a row makes no sense; wherever possible, before the model is loaded.
    """
    folder = Path(args.output_dir) / args.job_name
    check_ranges(vars(args))
    check_flags_agree(args)
    check_output_dir(folder)

    # Only now, for they take seconds and `--help` needs none of them.
    with quick_imports():
        from transformers import EarlyStoppingCallback, TrainerState, set_seed

        from d1.models import load_tokenizer
        from d1.models.convert import merge
        from d1.models.kinds import block_size
        from d1.models.tokenizer import check_chat_template
        from d1.runs.checkpoints import checkpoint_to_resume, copy_model, is_finished
        from d1.runs.console import RunConsole, log_to_console, train_with_console, write_metrics
        from d1.runs.hub import hold_push, publish
        from d1.runs.processes import check_processes
        from d1.runs.record import changed, log_without_account, save_record
        from d1.sft import setup
        from d1.sft.plot import plot_losses
        from d1.sft.trainer import dLLMDataCollator, dLLMTrainer

    log_to_console()
    setup.check_device(args)
    checkpoint = checkpoint_to_resume(str(folder), args.resume)
    training = setup.training_arguments(args, folder, fresh=checkpoint is None)
    push = hold_push(training)
    check_processes(training.world_size)
    if checkpoint is not None:
        setup.check_step_rows(checkpoint, training)
    set_seed(args.seed)  # LoRA's first weights are drawn before the Trainer seeds itself
    tokenizer = load_tokenizer(args.model_name, plain_chat_template=args.plain_chat_template)
    check_chat_template(tokenizer, args.model_name)
    train_dataset, eval_dataset = setup.load_data(args, training, tokenizer)
    setup.check_room(args.model_name, max(train_dataset.lengths))
    if training.should_save:
        launched = {"world_size": training.world_size, "distributed_type": training.distributed_state.distributed_type}
        launched["changed"] = changed(vars(args), vars(make_parser().parse_args([])), NOT_OF_THE_METHOD)
        save_record(str(folder), "run.json", vars(args) | launched)
        if not args.debugging:
            log_without_account(folder)
    model = setup.prepare_model(args)
    blocks, complementary = block_size(model.config), args.complementary_masks
    trainer = dLLMTrainer(
        model=model,
        args=training,
        data_collator=dLLMDataCollator(tokenizer, block_size=blocks, complementary=complementary, packed=args.packing),
        train_dataset=train_dataset,
        eval_dataset=eval_dataset,
        processing_class=tokenizer,
        callbacks=[EarlyStoppingCallback(args.early_stop)] if args.early_stop else None,
        group_by_length=args.group_by_length,
    )
    stopped = checkpoint is not None and setup.is_out_of_patience(checkpoint, args.early_stop)
    finished = stopped or is_finished(checkpoint, training)
    if checkpoint and finished:  # only what comes after training is left to do
        logging.getLogger(__name__).info("%s is finished: there is nothing left to train.", folder)
        trainer.state = TrainerState.load_from_json(f"{checkpoint}/trainer_state.json")
        if training.should_save:
            copy_model(trainer.state.best_model_checkpoint or checkpoint, folder)
            write_metrics(folder, trainer.state.log_history)
    else:
        train_with_console(trainer, RunConsole(), checkpoint)
        with writing(folder):
            trainer.save_model()
    trainer.save_state()
    if trainer.is_world_process_zero():
        plot_losses(trainer.state.log_history, folder / "losses.png")
        if args.merge_at_end:
            shutil.rmtree(folder / "merged", ignore_errors=True)
            with writing(folder / "merged"):
                merge(args.model_name, [str(folder)], str(folder / "merged"))
    trainer.end()
    if training.should_save:  # the other processes need not wait for an upload
        publish(training, push, started_again=finished)
    return trainer


def cli(prog: str, arguments: Sequence[str] | None = None) -> NoReturn:
    """Runs SFT as the command `prog`, with `arguments` in place of those of the command line; exits."""
    run_script(prog, lambda: main(make_parser(prog).parse_args(arguments)))


if __name__ == "__main__":
    cli("d1.sft.train")
