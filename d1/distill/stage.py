"""Distillation as a `Stage` of `d1.runs.stage`: its prompts, traces and trainer, and what a resume may change."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import Any

from transformers import TrainingArguments

from d1.distill.config import CANVAS, DistillConfig
from d1.distill.methods import METHODS
from d1.distill.states import Traces
from d1.distill.traces import TraceSampler, load_prompts, read_traces, sample_once
from d1.distill.trainer import DistillTrainer
from d1.models.attention import refuse_causal_context
from d1.models.folder import ModelFolder
from d1.models.kinds import block_size, check_room, require_masks
from d1.models.tokenizer import end_ids
from d1.runs.cli import from_rank_0
from d1.runs.record import ROWS, hash_settings, hash_values
from d1.runs.stage import Stage, cap_batch, on_resume, stage_of, trainer_arguments
from d1.sampling import SamplingSettings
from d1.sampling.settings import BLOCK_LENGTH, default_steps, refuse_scdd

logger = logging.getLogger(__name__)

SAMPLING_SECONDS = 7 * 24 * 3600  # a process may be hours behind another when all have sampled

# The settings that determine the traces, and so the name of their folder: those of this stage alone, and the others.
SAMPLING = (
    "data_file",
    "num_prompts",
    "max_prompt_length",
    "max_completion_length",
    "sampling_batch_size",
    "diffusion_steps",
    "block_length",
    "temperature",
    "keep",
)
SHARED = (
    "model_name",
    "dtype",
    "load_in_4bit",
    "full_finetuning",
    "train_data",
    "seed",
    "plain_chat_template",
    "bad_rows",
)
SCHEDULE = {"learning_rate", "weight_decay", "lr_scheduler_type", "warmup_steps"}  # as in the other stages
METHOD_SETTINGS = {name for method in METHODS.values() for name in method.values}
ON_RESUME = on_resume(
    "method",
    "dtype",
    *{*SAMPLING, *METHOD_SETTINGS} - SCHEDULE,
    free=("save_steps", "views_at_once"),
)


def stage(args: DistillConfig) -> Stage:
    training, folder = trainer_arguments(
        args,
        save_steps=args.save_steps,
        adam_beta2=args.adam_beta2,
        eval_strategy="no",
        ddp_timeout=SAMPLING_SECONDS,
    )
    args.max_completion_length = args.max_completion_length or folder.gen_length or CANVAS
    if args.diffusion_steps is None:
        block = args.block_length or block_size(folder.config) or BLOCK_LENGTH
        args.diffusion_steps = default_steps(args.max_completion_length, block)
    return stage_of(args, training, folder, prepare, ON_RESUME)


def prepare(
    args: DistillConfig, training: TrainingArguments, tokenizer: Any, folder: ModelFolder
) -> tuple[Mapping[str, Any], Callable[[Any], DistillTrainer]]:
    """The method's paper and the fingerprint of the prompts, and a function that samples the traces of a model and
    makes its trainer."""
    config = folder.config
    refuse_causal_context(config, "distillation")
    require_masks(config, "distillation")
    settings = SamplingSettings.from_attributes(
        args, config, gen_length="max_completion_length", steps="diffusion_steps"
    )
    refuse_scdd(settings, "distillation")
    prompts = load_prompts(args, tokenizer)
    if args.keep == "right" and prompts.judge is None:
        raise ValueError(f"--keep right needs a task that judges completions: {args.train_data} is none; --keep all")
    longest = max(map(len, prompts.ids))
    check_room(config, longest, settings.gen_length, ": lower --max_prompt_length or --max_completion_length")
    judge = prompts.judge if args.keep == "right" else None
    sampler = TraceSampler(prompts, settings, tokenizer, judge)
    if training.should_save:
        logger.info("%d prompts, of at most %d tokens", len(prompts.ids), longest)

    def make_trainer(model: Any) -> DistillTrainer:
        rows, traces, compute = sample_or_read_traces(args, training, sampler, model)
        cap_batch(training, len(rows))
        return DistillTrainer(
            args,
            sampler,
            rows,
            traces,
            computed_tokens=compute,
            model=model,
            args=training,
            processing_class=tokenizer,
        )

    return {"paper": METHODS[args.method].paper, ROWS + "train_data": prompts.rows}, make_trainer


def sample_or_read_traces(
    args: DistillConfig, training: TrainingArguments, sampler: TraceSampler, model: Any
) -> tuple[list[int], Traces, int]:
    """The numbers and the traces of the prompts that are trained on, and the tokens that sampling processed. Traces of
    the same settings, model, task and prompts in the run's folder are read, not sampled again."""
    settings = {name: getattr(args, name) for name in (*SAMPLING, *SHARED)}
    settings[ROWS + "train_data"] = sampler.prompts.rows
    settings["order"] = "by length"  # of the prompts in the files
    name = from_rank_0(lambda: hash_values(settings | hash_settings(settings)))
    folder = Path(str(training.output_dir)) / "traces" / name

    model.to(training.device)
    with gathered_weights(model):
        files = sample_once(
            sampler,
            model,
            folder,
            args.seed,
            batch=args.sampling_batch_size,
            process=training.process_index,
            processes=training.world_size,
        )
    if training.distributed_state is not None:
        training.distributed_state.wait_for_everyone()
    traces, compute = read_traces(files, end_ids(sampler.tokenizer))
    rows = traces.right.nonzero().squeeze(1)
    if training.should_save:
        left_out = len(traces.right) - len(rows)
        logger.info("%d traces to train on; left out because none was right: %d", len(rows), left_out)
    if not len(rows):
        raise ValueError(f"nothing to train on: no completion of {len(traces.right)} prompts is right (--keep all)")
    return rows.tolist(), traces.at(rows), compute


def gathered_weights(model: Any) -> AbstractContextManager[Any]:
    """All weights whole while the model samples: under ZeRO-3 each process holds shares, and no engine gathers yet."""
    shares = [weight for weight in model.parameters() if hasattr(weight, "ds_id")]
    if not shares:
        return nullcontext()
    import deepspeed  # not installed where nothing is sharded by it

    return deepspeed.zero.GatheredParameters(shares)
