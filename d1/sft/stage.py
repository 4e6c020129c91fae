"""SFT as a `Stage` of `d1.runs.stage`: its rows, its trainer, and what a resume may change."""

from __future__ import annotations

import json
import logging
import math
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Any

from datasets import Dataset
from transformers import TrainingArguments

from d1.models.attention import has_causal_context
from d1.models.folder import ModelFolder
from d1.models.kinds import attention_name, block_size, check_room, has_masks, vocabulary
from d1.runs.checkpoints import read_state
from d1.runs.cli import from_rank_0
from d1.runs.console import show_row
from d1.runs.data import load_rows
from d1.runs.record import RECORD, ROWS, hash_rows, hash_values
from d1.runs.stage import Stage, cap_batch, on_resume, stage_of, trainer_arguments
from d1.sampling.scdd import MixedNoise
from d1.sft.config import CANVAS_SETTINGS, EDIT_SETTINGS, CausalLoss, SFTConfig
from d1.sft.data import dLLMDataCollator, dLLMSFTDataset, load_function, preprocess_dataset
from d1.sft.diffusion_gemma import CanvasCollator, CanvasTrainer
from d1.sft.editing import EditNoise
from d1.sft.scdd import SCDDCollator, SCDDTrainer
from d1.sft.trainer import EDITS_AND_CONTEXT, dLLMTrainer

logger = logging.getLogger(__name__)

ON_RESUME = on_resume(
    # The rows
    "template",
    "data_function",
    "overlong",
    "max_length",
    "eos_padding",
    "test_split",
    "eval_draws",
    # The noise and the loss
    "assistant_only_loss",
    "edit_noise",
    *EDIT_SETTINGS,
    "masked_weight",
    "row_noise",
    *CANVAS_SETTINGS,
    "noise",
    "uniform_ratio",
    free=("quiet",),
)
LONG_EVALUATIONS = 0.25  # of the time of training
# Settings of a model that hides tokens by masks, which do nothing for uniform noise.
MASK_SETTINGS = ("packing", "complementary_masks", "edit_noise", "eos_padding")


def stage(args: SFTConfig) -> Stage:
    evaluate = args.test_split > 0
    if not evaluate and args.eval_draws != SFTConfig.eval_draws:
        raise ValueError(f"--eval_draws {args.eval_draws} would do nothing: --test_split 0 holds out no rows")
    training, folder = trainer_arguments(
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
    outcome = partial(describe_saved_step, Path(str(training.output_dir)), args.keep_last)
    return stage_of(args, training, folder, prepare, ON_RESUME, args.lora_dropout, outcome=outcome)


def prepare(
    args: SFTConfig, training: TrainingArguments, tokenizer: Any, folder: ModelFolder
) -> tuple[Mapping[str, Any], Callable[[Any], dLLMTrainer]]:
    """The fingerprint of the run's rows and how many are held out, and a function that makes the trainer of a model."""
    config = folder.config
    causal = CausalLoss(args.masked_weight, args.row_noise, args.causal_weight)
    check_noise(args, config)

    # Text to tokens. The other processes read the cache of the first.
    with training.main_process_first(local=False, desc="tokenising"):
        data = load_rows(args.train_data)
        function = None
        if args.data_function:
            function = load_function(args.data_function)
        train_rows, held_out_rows = preprocess_dataset(
            data,
            tokenizer,
            args.max_length,
            args.test_split,
            overlong=args.overlong,
            bad_rows=args.bad_rows,
            function=function,
            template=args.template,
            assistant_only_loss=args.assistant_only_loss,
            num_proc=args.num_proc,
            seed=args.seed,
        )

    def make_dataset(rows: Dataset, eval: bool = False) -> dLLMSFTDataset:
        return dLLMSFTDataset(
            rows,
            tokenizer,
            args.max_length,
            eval,
            eos_padding=args.eos_padding if has_masks(config) else 0,  # canvases are filled by their collator
            seed=args.seed,
            eval_draws=args.eval_draws,
        )

    train_dataset = make_dataset(train_rows)
    eval_dataset = None
    datasets = [train_dataset]
    if args.test_split:
        eval_dataset = make_dataset(held_out_rows, eval=True)
        datasets.append(eval_dataset)

    # The longest row has to fit the model, first as it is and then with its EOS.
    longest = max(max(dataset.rows["length"][:]) for dataset in datasets)
    check_room(config, longest, 0, ": lower --max_length")
    longest_filled = max(max(dataset.lengths) for dataset in datasets)
    advice = f": --eos_padding {args.eos_padding} fills rows; lower it or --max_length"
    check_room(config, longest_filled, 0, advice)

    cap_batch(training, len(train_dataset))
    if eval_dataset is not None and training.process_index == 0:
        log_long_evaluations(len(train_dataset), len(eval_dataset), args.eval_steps, training)
    fingerprint = from_rank_0(lambda: hash_values([hash_rows(dataset.rows) for dataset in datasets]))
    facts = {ROWS + "train_data": fingerprint, "held_out_rows": len(held_out_rows) if args.test_split else 0}
    if training.process_index == 0 and not args.quiet:
        show_row(train_rows[0]["input_ids"], train_rows[0]["answer"], tokenizer)

    def make_trainer(model: Any) -> dLLMTrainer:
        trainer_class: type[dLLMTrainer] = dLLMTrainer
        options: dict[str, Any] = {}
        collator: dLLMDataCollator
        if not has_masks(model.config):
            trainer_class = CanvasTrainer
            options["causal_weight"] = args.causal_weight
            canvas_length = model.config.canvas_length
            collator = CanvasCollator(tokenizer, canvas_length, vocabulary(model.config), args.self_conditioning)
        elif args.noise == "scdd":
            trainer_class = SCDDTrainer
            model.config.uniform_ratio = args.uniform_ratio  # saved with it: the sampler scdd reads it
            noise = MixedNoise(args.uniform_ratio)
            collator = SCDDCollator(tokenizer, noise, vocabulary(model.config), packed=args.packing)
        else:
            edits = None
            if args.edit_noise is not None:
                model.config.edit_noise = args.edit_noise  # saved with it: samplers then edit without a warning
                edits = EditNoise(
                    kind=args.edit_noise,
                    share=args.edit_share,
                    weight=args.edit_weight,
                    keep_weight=args.edit_keep_weight,
                    turns=args.edit_turns,
                )
            collator = dLLMDataCollator(
                tokenizer,
                block_size=block_size(model.config),
                complementary=args.complementary_masks,
                packed=args.packing,
                edits=edits,
                causal=causal if has_causal_context(model.config) else None,
            )
        return trainer_class(
            model=model,
            args=training,
            data_collator=collator,
            train_dataset=train_dataset,
            eval_dataset=eval_dataset,
            processing_class=tokenizer,
            **options,
        )

    return facts, make_trainer


def check_noise(args: SFTConfig, config: Any) -> None:
    """Raise ValueError for settings of another kind of noise, or of another context, than the model's."""
    if has_causal_context(config):
        if args.edit_noise is not None:
            raise ValueError(EDITS_AND_CONTEXT)
        if args.assistant_only_loss and args.masked_weight and not args.row_noise:
            raise ValueError(
                "--assistant_only_loss: with a causal context, blocks begin with the first answer of a row, and those "
                "of its later turns would not begin with theirs: leave it out, or set --row_noise, whose blocks begin "
                "with the row, or --masked_weight 0, which has no blocks"
            )
        if args.masked_weight == args.causal_weight == 0:
            raise ValueError(
                "--masked_weight 0 and --causal_weight 0 leave nothing to train on: set one of them above 0"
            )
    elif args.masked_weight != CausalLoss.masked_weight or args.row_noise:
        raise ValueError("--masked_weight and --row_noise would do nothing: this model has no causal context")

    if has_masks(config):
        inactive_settings: tuple[str, ...] = CANVAS_SETTINGS
        reason = "hides tokens by masks"
    else:
        inactive_settings = MASK_SETTINGS
        reason = "has uniform noise, in canvases that EOS fills"
    for name in inactive_settings:
        if name == "causal_weight" and has_causal_context(config):
            continue  # it weighs the clean text's loss there
        value = getattr(args, name)
        if value != getattr(SFTConfig, name):
            raise ValueError(f"--{name} {value} would do nothing: {config.model_type} {reason}")

    if args.noise == "scdd":
        check_scdd(args, config)


def check_scdd(args: SFTConfig, config: Any) -> None:
    """Raise ValueError if `--noise scdd` does not suit the model or another setting."""
    attention = "uniform noise alone"
    if has_masks(config):
        attention = f"{attention_name(config)} attention"
    if attention != "full attention":
        raise ValueError(
            f"--noise scdd needs masks and full attention, and {config.model_type} has {attention}: leave --noise out"
        )
    if args.edit_noise is not None:
        raise ValueError(f"--edit_noise {args.edit_noise} is another noise than --noise scdd: use one of them")
    if args.complementary_masks:
        raise ValueError("--complementary_masks hides what a first draw left visible, and --noise scdd also replaces")


def log_long_evaluations(rows: int, evaluated_rows: int, eval_steps: int, training: TrainingArguments) -> None:
    """Warns if evaluations take more than a quarter of the time of training, by their forward passes; a backward pass
    has twice the operations. `evaluated_rows` counts each draw of a row."""
    rows_per_step = training.per_device_train_batch_size * training.gradient_accumulation_steps * training.world_size
    steps = training.max_steps
    if steps <= 0:
        steps = math.ceil(training.num_train_epochs * math.ceil(rows / rows_per_step))
    evaluations = steps // eval_steps
    share = evaluations * evaluated_rows / (3 * steps * rows_per_step)
    if share > LONG_EVALUATIONS:
        logger.warning(
            "Evaluations take about %.0f%% of the time of training: each %d steps, %d forward passes of a row. Raise "
            "--eval_steps, or lower --test_split or --eval_draws.",
            100 * share,
            eval_steps,
            evaluated_rows,
        )


def describe_saved_step(folder: Path, keep_last: bool) -> list[str]:
    """The line with the step whose weights a finished run saved, and the losses that decided; none without losses."""
    state = read_state(folder)
    losses = {entry["step"]: entry["eval_loss"] for entry in state.log_history if "eval_loss" in entry}
    best = state.best_global_step
    if not best or best not in losses:
        return []
    last = max(losses)
    rows = json.loads((folder / RECORD).read_text())["settings"].get("held_out_rows", "the")
    compared = f"{losses[best]:.4f} at step {best}"
    if last != best:
        compared += f", {losses[last]:.4f} at step {last}"
    takes_best = state.best_model_checkpoint is not None and not keep_last
    saved = best if takes_best else state.global_step
    hint = ""
    if saved != state.global_step:
        hint = "; --keep_last saves those of the last step"
    return [
        f"Saved: the weights of step {saved} of {state.global_step}. Loss on {rows} held-out rows: {compared}{hint}."
    ]
