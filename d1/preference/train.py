"""Preference training of a masked diffusion language model: VRPO (pairs) or ELBO-KTO (labels).

    accelerate launch --config_file launch/ddp.yaml --num_processes 8 -m d1.preference.train \\
        --method vrpo --train_data pairs.jsonl

The model (or its LoRA adapter) is saved to OUTPUT_DIR/JOB_NAME, which eval.py and the other stages take as a model
path; so are the checkpoints and everything that is logged.
"""

from __future__ import annotations

import argparse
import logging
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
from d1.preference.config import PreferenceConfig
from d1.preference.data import PreferenceCollator, PreferenceDataset, token_rows
from d1.preference.methods import METHODS
from d1.preference.trainer import PreferenceTrainer
from d1.runs.cli import ConfigParser, quick_imports, run_script
from d1.runs.data import load_rows
from d1.runs.record import ROWS, of_rows
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
from d1.runs.trainer import read_sums
from d1.scoring import ESTIMATORS, ViewSettings

if TYPE_CHECKING:
    from d1.preference.trainer import PreferenceTrainer


# --- Setup ------------------------------------------------------------------------------------------------------------
#
# The rows, the models and the trainer of a run of preference training, made from its flags.

logger = logging.getLogger(__name__)

ON_RESUME = on_resume(
    *("max_prompt_length", "max_completion_length", "estimator", "num_views", "spread", "antithetic"),  # rows and views
    *("method", "beta"),  # the loss and the reference
    "adam_beta2",
    free=("save_steps", "views_at_once"),
)


def stage(args: PreferenceConfig) -> Stage:
    """Preference training as the skeleton of a run takes it."""
    check_device(args)
    training = trainer_arguments(args, save_steps=args.save_steps, adam_beta2=args.adam_beta2, eval_strategy="no")
    return Stage(
        training=training,
        settings=lambda: settings_of_run(args, training),
        on_resume=ON_RESUME,
        prepare=lambda: prepare(args, training),
        conclude=lambda: conclude(args),
        next_command=lambda: f"python -m d1 chat {shlex.quote(str(training.output_dir))}",
        check=lambda checkpoint: read_sums(checkpoint / PreferenceTrainer.sums_file),
    )


def view_settings(args: PreferenceConfig) -> ViewSettings:
    """What the estimator of the bounds reads."""
    return ViewSettings(
        gen_length=args.max_completion_length,
        num_views=args.num_views,
        antithetic=args.antithetic,
        stratified=args.spread == "even",
    )


def prepare(args: PreferenceConfig, training: TrainingArguments) -> Prepared:
    """The rows of a run, checked; returns facts for its record, and what loads the models and makes the trainer."""
    tokenizer = load_tokenizer(args.model_name, plain_chat_template=args.plain_chat_template)
    check_chat_template(tokenizer, args.model_name)
    method, config = METHODS[args.method], native_config(adapter_chain(args.model_name, None)[0])[0]
    with training.main_process_first(local=False, desc="tokenising"):  # the others read its cache
        limits = args.max_prompt_length, args.max_completion_length
        options: dict[str, Any] = {"paired": method.paired, "bad_rows": args.bad_rows, "num_proc": args.num_proc}
        rows = token_rows(load_rows(args.train_data), tokenizer, *limits, **options)
    longest = max(map(len, rows["prompt_ids"]))
    check_room(config, longest, args.max_completion_length, ": lower --max_prompt_length or --max_completion_length")
    cap_batch(training, len(rows))
    estimator, settings = ESTIMATORS[str(args.estimator)], view_settings(args)
    if training.should_save:
        kind = "pairs" if method.paired else "completions"
        logger.info("%d %s, %d views of each completion", len(rows), kind, estimator.views(settings))

    def start() -> PreferenceTrainer:
        set_seed(args.seed)  # LoRA's first weights are drawn before the Trainer seeds itself
        model = prepare_model(args)
        return PreferenceTrainer(
            method=method,
            beta=float(args.beta or 0),
            mask_token_id=tokenizer.mask_token_id,
            reference=prepare_model(args).requires_grad_(False) if args.full_finetuning else None,
            views_at_once=args.views_at_once,
            model=model,
            args=training,
            data_collator=PreferenceCollator(tokenizer, estimator, settings, block_size(model.config)),
            train_dataset=PreferenceDataset(rows, args.seed),
            processing_class=tokenizer,
        )

    return {"paper": method.paper, ROWS + "train_data": of_rows(rows)}, start


# --- Train ------------------------------------------------------------------------------------------------------------


def make_parser(prog: str | None = None) -> ConfigParser:
    as_written = argparse.RawDescriptionHelpFormatter
    return ConfigParser(PreferenceConfig, prog, METHODS, description=__doc__, formatter_class=as_written)


def main(args: PreferenceConfig) -> PreferenceTrainer | None:
    """Trains, and saves the model and the Trainer's state.

    Returns the trainer, or None where the run was finished already.

    Raises:
        ValueError, OSError: a file or a row makes no sense; wherever possible, before the model is loaded.
    """
    check_output_dir(Path(args.output_dir) / args.job_name)
    with quick_imports():  # only now: they take seconds, and `--help` needs none of them
        from d1.preference.train import stage
        from d1.runs.stage import run

    return run(stage(args))


def cli(prog: str, arguments: Sequence[str] | None = None) -> NoReturn:
    """Runs preference training as the command `prog`, with `arguments` in place of those of the command line; exits."""
    run_script(prog, lambda: main(make_parser(prog).parse_args(arguments)))


if __name__ == "__main__":
    cli("d1.preference.train")
