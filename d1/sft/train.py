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

from d1.runs.entry import quick_imports, run_script
from d1.runs.output_dir import check_output_dir, writing
from d1.runs.settings import ConfigParser
from d1.sft.config import SFTConfig

if TYPE_CHECKING:
    from d1.sft.trainer import dLLMTrainer

# Settings that a model card has elsewhere, or that made no difference to the model.
NOT_OF_THE_METHOD = (
    *("output_dir", "job_name", "model_name", "train_data", "debugging", "resume", "num_proc", "logging_steps"),
    *("push_to_hub", "hub_model_id", "hub_private_repo"),
)


def make_parser(prog: str | None = None) -> ConfigParser:
    return ConfigParser(SFTConfig, prog, description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)


def main(args: SFTConfig) -> dLLMTrainer:
    """Trains, and saves the model, the Trainer's state and the plot of the losses.

    Raises:
        ValueError, OSError: a flag, a file or a row makes no sense; wherever possible, before the model is loaded.
    """
    folder = Path(args.output_dir) / args.job_name
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
        launched["changed"] = changed(vars(args), vars(SFTConfig()), NOT_OF_THE_METHOD)
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
