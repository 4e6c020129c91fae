"""Masked supervised fine-tuning of a diffusion language model.

    accelerate launch --config_file SFT/ddp_config.yaml --num_processes 2 -m d1.sft.train \\
        --grad_accum_steps 4 --batch_size 1 --num_epochs 20

The fine-tuned model (or its LoRA adapter), the checkpoints and the logged losses are saved to OUTPUT_DIR/JOB_NAME,
which diffu_grpo_train.py and eval.py accept as a model path.
"""

from __future__ import annotations

import argparse
import json
import shlex
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn

from transformers import TrainingArguments, set_seed

from d1.files import check_output_dir
from d1.models import load_tokenizer
from d1.models.adapters import adapter_chain
from d1.models.kinds import block_size, check_room, native_config
from d1.models.tokenizer import check_chat_template
from d1.runs.checkpoints import read_state
from d1.runs.cli import ConfigParser, quick_imports, run_script
from d1.runs.record import RECORD, ROWS, of_rows, of_values
from d1.runs.stage import (
    Prepared,
    Stage,
    cap_batch,
    check_device,
    conclude,
    on_resume,
    prepare_model,
    settings_of_run,
    trainer_arguments,
)
from d1.runs.stage import on_gpu as on_gpu
from d1.runs.trainer import read_sums
from d1.sft.config import EDIT_SETTINGS, SFTConfig
from d1.sft.data import load_function, load_rows, preprocess_dataset
from d1.sft.editing import EditNoise
from d1.sft.trainer import LOSS_SUMS, dLLMDataCollator, dLLMSFTDataset, dLLMTrainer

if TYPE_CHECKING:
    from d1.sft.trainer import dLLMTrainer


# --- Setup ------------------------------------------------------------------------------------------------------------
#
# Build the rows, the model and the trainer of an SFT run from its flags.

SAME_IN_DATA = ("max_length", "test_split", "overlong", "bad_rows", "template", "num_proc", "seed")

ON_RESUME = on_resume(
    *("template", "data_function", "overlong", "max_length", "eos_padding", "test_split", "eval_draws"),  # the rows
    *("edit_noise", *EDIT_SETTINGS),
)


def stage(args: SFTConfig) -> Stage:
    """SFT as a `Stage` for `d1.runs.stage.run`."""
    check_device(args)
    training = training_arguments(args)
    return Stage(
        training=training,
        settings=lambda: settings_of_run(args, training),
        on_resume=ON_RESUME,
        prepare=lambda: prepare(args, training),
        conclude=lambda: conclude(args),
        check=lambda checkpoint: read_sums(checkpoint / LOSS_SUMS),
        outcome=lambda: kept_step(Path(str(training.output_dir)), args.keep_last),
        next_command=lambda: f"python -m d1 chat {shlex.quote(str(training.output_dir))}",
    )


def prepare(args: SFTConfig, training: TrainingArguments) -> Prepared:
    """Prepares and checks the rows of a run; returns their fingerprint and how many are held out, and a function that
    loads the model and makes the trainer."""
    tokenizer = load_tokenizer(args.model_name, plain_chat_template=args.plain_chat_template)
    check_chat_template(tokenizer, args.model_name)
    train_dataset, eval_dataset = load_data(args, training, tokenizer)
    datasets = [rows for rows in (train_dataset, eval_dataset) if rows is not None]
    check_lengths(args, datasets)
    cap_batch(training, len(train_dataset))
    facts = {ROWS + "train_data": of_values([of_rows(one.rows) for one in datasets])}

    def start() -> dLLMTrainer:
        set_seed(args.seed)  # LoRA's first weights are drawn before the Trainer sets the seed
        model = prepare_model(args, args.lora_dropout)
        options: dict[str, Any] = {"complementary": args.complementary_masks, "packed": args.packing}
        options["edits"] = EditNoise.of(args)
        if args.edit_noise is not None:
            model.config.edit_noise = args.edit_noise  # saved with it: samplers then edit without a warning
        collator = dLLMDataCollator(tokenizer, block_size=block_size(model.config), **options)
        return dLLMTrainer(
            model=model,
            args=training,
            data_collator=collator,
            train_dataset=train_dataset,
            eval_dataset=eval_dataset,
            processing_class=tokenizer,
        )

    return facts | {"held_out_rows": 0 if eval_dataset is None else len(eval_dataset.rows)}, start


def kept_step(folder: Path, keep_last: bool) -> list[str]:
    """The line that says which step's weights a finished run saved, and the losses that decided; none without them."""
    state = read_state(folder)
    losses = {entry["step"]: entry["eval_loss"] for entry in state.log_history if "eval_loss" in entry}
    best, last = state.best_global_step, max(losses, default=0)
    if not best or best not in losses:
        return []
    rows = json.loads((folder / RECORD).read_text())["settings"].get("held_out_rows", "the")
    lowest = f"the lowest loss on {rows} held-out rows, {losses[best]:.4f}"
    other = "" if last == best else f" (step {last}: {losses[last]:.4f})"
    if keep_last:
        return [f"Saved: the weights of the last step, {state.global_step}. Step {best} has {lowest}{other}."]
    hint = "" if best == state.global_step else "; --keep_last saves those of the last step"
    return [f"Saved: the weights of step {best} of {state.global_step}, with {lowest}{other}{hint}."]


def training_arguments(args: SFTConfig) -> TrainingArguments:
    evaluate = args.test_split > 0
    return trainer_arguments(
        args,
        per_device_eval_batch_size=args.batch_size,
        eval_strategy="steps" if evaluate else "no",
        eval_on_start=evaluate,
        eval_steps=args.eval_steps,
        save_steps=args.eval_steps,
        load_best_model_at_end=evaluate and not args.keep_last,
        metric_for_best_model="eval_loss" if evaluate else None,
        greater_is_better=False if evaluate else None,
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


# --- Train ------------------------------------------------------------------------------------------------------------


def make_parser(prog: str | None = None) -> ConfigParser:
    return ConfigParser(SFTConfig, prog, description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)


def main(args: SFTConfig) -> dLLMTrainer | None:
    """Trains, and saves the model and the Trainer's state.

    Returns the trainer, or None if the run was finished already.

    Raises:
        ValueError, OSError: a file or a row is wrong; raised before the model is loaded where possible.
    """
    check_output_dir(Path(args.output_dir) / args.job_name)
    with quick_imports():  # only now: they take seconds, and `--help` does not need them
        from d1.runs.stage import run
        from d1.sft.train import stage

    return run(stage(args))


def cli(prog: str, arguments: Sequence[str] | None = None) -> NoReturn:
    """Runs SFT as the command `prog` with `arguments` (default: those of the command line), then exits."""
    run_script(prog, lambda: main(make_parser(prog).parse_args(arguments)))


if __name__ == "__main__":
    cli("d1.sft.train")
