"""Distillation of a masked diffusion language model, so that it needs fewer steps: dParallel, T3D, d-OPSD.

    accelerate launch --config_file launch/ddp.yaml --num_processes 8 -m d1.distill.train \\
        --method dparallel --train_data gsm8k

The model (or its LoRA adapter) is saved to OUTPUT_DIR/JOB_NAME, which eval.py and the other stages take as a model
path; so are the checkpoints, the sampled traces and everything that is logged.
"""

from __future__ import annotations

import argparse
import logging
import shlex
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn

from transformers import TrainingArguments, set_seed

from d1.distill.config import READ_BY_SOME, DistillConfig
from d1.distill.methods import METHODS
from d1.distill.states import Traces
from d1.distill.traces import TraceSampler, load_prompts, read_traces, sample_once
from d1.distill.trainer import DistillTrainer, TraceDataset, collate
from d1.files import check_output_dir
from d1.models import load_tokenizer
from d1.models.adapters import adapter_chain
from d1.models.kinds import block_size, check_room, native_config
from d1.models.tokenizer import check_chat_template
from d1.runs.cli import ConfigParser, quick_imports, run_script
from d1.runs.record import ROWS, from_rank_0, of_settings, of_values
from d1.runs.stage import (
    Prepared,
    Stage,
    cap_batch,
    check_device,
    conclude,
    evaluation,
    on_resume,
    prepare_model,
    settings_of_run,
    trainer_arguments,
)
from d1.runs.trainer import read_sums
from d1.sampling import SamplingSettings
from d1.tasks import TASKS

if TYPE_CHECKING:
    from d1.distill.trainer import DistillTrainer


# --- Setup ------------------------------------------------------------------------------------------------------------
#
# The prompts, the traces, the model and the trainer of a distillation, made from its flags.

logger = logging.getLogger(__name__)

SAMPLING = (  # settings of the traces; with those of the model and the data they name the traces' folder
    *("data_file", "num_prompts", "max_prompt_length", "max_completion_length", "sampling_batch_size"),
    *("diffusion_steps", "block_length", "temperature", "keep", "tries"),
)
ALSO = (
    *("model_name", "train_data", "seed", "plain_chat_template", "bad_rows"),
    *("dtype", "load_in_4bit", "full_finetuning"),  # the dtype of the weights that sample
)
SCHEDULE = {"learning_rate", "weight_decay", "lr_scheduler_type", "warmup_steps"}  # as in the other stages
ON_RESUME = on_resume("method", *{*SAMPLING, *READ_BY_SOME} - SCHEDULE, free=("save_steps", "views_at_once"))


def stage(args: DistillConfig) -> Stage:
    """Distillation as the skeleton of a run takes it."""
    check_device(args)
    training = trainer_arguments(args, save_steps=args.save_steps, adam_beta2=args.adam_beta2, eval_strategy="no")
    return Stage(
        training=training,
        settings=lambda: settings_of_run(args, training),
        on_resume=ON_RESUME,
        prepare=lambda: prepare(args, training),
        conclude=lambda: conclude(args),
        next_command=lambda: next_command(args, str(training.output_dir)),
        check=lambda checkpoint: read_sums(checkpoint / DistillTrainer.sums_file),
    )


def next_command(args: DistillConfig, folder: str) -> str:
    """The command that evaluates the model on the task of the run, with its sampling; without a task, a chat."""
    if args.train_data not in TASKS and not args.train_data.endswith(".py"):
        return f"python -m d1 chat {shlex.quote(folder)}"
    flags = {"gen_length": args.max_completion_length, "block_length": args.block_length}
    flags |= {"diffusion_steps": args.diffusion_steps}
    return evaluation(folder, args.train_data, flags)


def sampling_settings(args: DistillConfig, config: Any) -> SamplingSettings:
    return SamplingSettings.of(args, config, gen_length="max_completion_length", steps="diffusion_steps")


def prepare(args: DistillConfig, training: TrainingArguments) -> Prepared:
    """The prompts of a run, checked; returns facts for its record, and what loads the model, samples the traces and
    makes the trainer."""
    method, config = METHODS[args.method], native_config(adapter_chain(args.model_name, None)[0])[0]
    if method.looks_ahead and block_size(config) is not None:
        raise ValueError(
            f"--method {args.method} shows the teacher tokens of later blocks, which a block-causal model cannot see: "
            "use another method"
        )
    tokenizer = load_tokenizer(args.model_name, plain_chat_template=args.plain_chat_template)
    check_chat_template(tokenizer, args.model_name)
    settings = sampling_settings(args, config)
    options: dict[str, Any] = {"max_prompt_length": args.max_prompt_length, "count": args.num_prompts}
    options |= {"seed": args.seed, "bad_rows": args.bad_rows}
    prompts = load_prompts(args.train_data, args.data_file, tokenizer, **options)
    if args.keep == "right" and prompts.judge is None:
        raise ValueError(f"--keep right needs a task that judges completions: {args.train_data} is none; --keep all")
    longest = max(map(len, prompts.ids))
    check_room(config, longest, args.max_completion_length, ": lower --max_prompt_length or --max_completion_length")
    judge = prompts.judge if args.keep == "right" else None
    sampler = TraceSampler(prompts, settings, tokenizer, int(args.tries or 1), judge)
    if training.should_save:
        logger.info("%d prompts, of at most %d tokens", len(prompts.ids), longest)

    def start() -> DistillTrainer:
        set_seed(args.seed)  # LoRA's first weights are drawn before the Trainer seeds itself
        model = prepare_model(args)
        rows, traces, compute = list(range(len(prompts.ids))), None, 0
        if not method.on_policy:
            rows, traces, compute = sampled_before(args, training, sampler, model)
        cap_batch(training, len(rows))
        return DistillTrainer(
            settings=args,
            sampler=sampler,
            rows=rows,
            traces=traces,
            compute=compute,
            model=model,
            args=training,
            data_collator=collate,
            train_dataset=TraceDataset(len(rows)),
            processing_class=tokenizer,
        )

    return {"paper": method.paper, ROWS + "train_data": prompts.rows}, start


def sampled_before(
    args: DistillConfig, training: TrainingArguments, sampler: TraceSampler, model: Any
) -> tuple[list[int], Traces, int]:
    """The numbers and the traces of the prompts that are trained on, and the tokens that sampling processed.

    Traces of the same settings, model, task and prompts that are in the run's folder are read, not sampled again.
    Raises ValueError if no trace is left.
    """
    known = {name: getattr(args, name) for name in (*SAMPLING, *ALSO)} | {ROWS + "train_data": sampler.prompts.rows}
    name = from_rank_0(lambda: of_values(known | of_settings(known)))
    folder = Path(str(training.output_dir)) / "traces" / name
    model.to(training.device)
    shared = args.sampling_batch_size, training.process_index, training.world_size
    sample_once(sampler, model, folder, args.seed, *shared)
    if training.distributed_state is not None:
        training.distributed_state.wait_for_everyone()
    traces, compute = read_traces(folder, sampler.tokenizer.eos_token_id)
    rows = traces.right.nonzero().squeeze(1)
    if training.should_save:
        left_out = len(traces.right) - len(rows)
        logger.info("%d traces to train on; left out because none was right: %d", len(rows), left_out)
    if not len(rows):
        raise ValueError(f"nothing to train on: no completion of {len(traces.right)} prompts is right (--keep all)")
    return rows.tolist(), traces.at(rows), compute


# --- Train ------------------------------------------------------------------------------------------------------------


def make_parser(prog: str | None = None) -> ConfigParser:
    as_written = argparse.RawDescriptionHelpFormatter
    return ConfigParser(DistillConfig, prog, METHODS, description=__doc__, formatter_class=as_written)


def main(args: DistillConfig) -> DistillTrainer | None:
    """Trains, and saves the model and the Trainer's state.

    Returns the trainer, or None where the run was finished already.

    Raises:
        ValueError, OSError: a file or a row makes no sense; wherever possible, before the model is loaded.
    """
    check_output_dir(Path(args.output_dir) / args.job_name)
    with quick_imports():  # only now: they take seconds, and `--help` needs none of them
        from d1.distill.train import stage
        from d1.runs.stage import run

    return run(stage(args))


def cli(prog: str, arguments: Sequence[str] | None = None) -> NoReturn:
    """Runs distillation as the command `prog`, with `arguments` in place of those of the command line; exits."""
    run_script(prog, lambda: main(make_parser(prog).parse_args(arguments)))


if __name__ == "__main__":
    cli("d1.distill.train")
