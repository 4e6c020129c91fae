"""SFT as a `Stage` of `d1.runs.stage`: its rows, its trainer, and what a resume may change."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Any

from transformers import TrainingArguments

from d1.models.attention import has_causal_context
from d1.models.kinds import attention_name, block_size, check_room, has_masks, vocabulary
from d1.runs.checkpoints import read_state
from d1.runs.console import show_row
from d1.runs.data import load_rows
from d1.runs.record import RECORD, ROWS, hash_values, of_rows
from d1.runs.stage import Stage, cap_batch, on_resume, stage_of, trainer_arguments
from d1.sampling.scdd import MixedNoise
from d1.sft.canvases import CanvasCollator, CanvasTrainer
from d1.sft.config import EDIT_SETTINGS, OF_CANVASES, CausalLoss, SFTConfig
from d1.sft.data import dLLMDataCollator, dLLMSFTDataset, load_function, preprocess_dataset
from d1.sft.editing import EditNoise
from d1.sft.scdd import SCDDCollator, SCDDTrainer
from d1.sft.trainer import EDITS_AND_CONTEXT, dLLMTrainer

SAME_IN_DATA = (
    *("max_length", "test_split", "overlong", "bad_rows", "template", "assistant_only_loss", "num_proc", "seed"),
)
ON_RESUME = on_resume(
    *("template", "data_function", "overlong", "max_length", "eos_padding", "test_split", "eval_draws"),  # the rows
    *("assistant_only_loss", "edit_noise", *EDIT_SETTINGS, "masked_weight", "row_noise", *OF_CANVASES),
    *("noise", "uniform_ratio"),
    free=("quiet",),
)


def stage(args: SFTConfig) -> Stage:
    evaluate = args.test_split > 0
    training, model = trainer_arguments(
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
    outcome = partial(kept_step, Path(str(training.output_dir)), args.keep_last)
    return stage_of(args, training, model, prepare, ON_RESUME, args.lora_dropout, outcome=outcome)


def prepare(
    args: SFTConfig, training: TrainingArguments, tokenizer: Any, config: Any
) -> tuple[Mapping[str, Any], Callable[[Any], dLLMTrainer]]:
    """The fingerprint of the run's rows and how many are held out, and a function that makes the trainer of a model."""
    causal = CausalLoss(args.masked_weight, args.row_noise, args.causal_weight)
    if has_causal_context(config) and args.edit_noise is not None:
        raise ValueError(EDITS_AND_CONTEXT)
    if has_causal_context(config) and causal.masked_weight == causal.causal_weight == 0:
        raise ValueError("--masked_weight 0 and --causal_weight 0 leave nothing to train on: set one of them above 0")
    if (args.masked_weight != CausalLoss.masked_weight or args.row_noise) and not has_causal_context(config):
        raise ValueError("--masked_weight and --row_noise would do nothing: this model has no causal context")
    check_noise(args, config)
    with training.main_process_first(local=False, desc="tokenising"):  # the others read its cache
        data = load_rows(args.train_data)
        function = load_function(args.data_function) if args.data_function else None
        options: dict[str, Any] = {name: getattr(args, name) for name in SAME_IN_DATA}
        rows = preprocess_dataset(data, tokenizer, function=function, **options)
    filling = args.eos_padding if has_masks(config) else 0  # canvases are filled by their collator
    shared: dict[str, Any] = {"eos_padding": filling, "seed": args.seed, "eval_draws": args.eval_draws}
    datasets = [dLLMSFTDataset(rows[0], tokenizer, args.max_length, **shared)]
    if args.test_split:
        datasets.append(dLLMSFTDataset(rows[1], tokenizer, args.max_length, eval=True, **shared))
    check_room(config, max(max(one.rows["length"]) for one in datasets), 0, ": lower --max_length")
    advice = f": --eos_padding {args.eos_padding} fills rows; lower it or --max_length"
    check_room(config, max(max(one.lengths) for one in datasets), 0, advice)
    cap_batch(training, len(datasets[0]))
    read = hash_values([of_rows(one.rows) for one in datasets])
    facts = {ROWS + "train_data": read, "held_out_rows": len(rows[1]) if args.test_split else 0}
    if training.process_index == 0 and not args.quiet:
        show_row(rows[0][0]["input_ids"], rows[0][0]["answer"], tokenizer)

    def make_trainer(model: Any) -> dLLMTrainer:
        arguments: dict[str, Any] = {"model": model, "args": training, "train_dataset": datasets[0]}
        arguments |= {"eval_dataset": datasets[1] if args.test_split else None, "processing_class": tokenizer}
        if not has_masks(model.config):
            sizes = model.config.canvas_length, vocabulary(model.config), args.self_conditioning
            return CanvasTrainer(args.causal_weight, data_collator=CanvasCollator(tokenizer, *sizes), **arguments)
        if args.noise == "scdd":
            model.config.uniform_ratio = args.uniform_ratio  # saved with it: the sampler scdd reads it
            noise = MixedNoise(args.uniform_ratio)
            collator = SCDDCollator(tokenizer, noise, vocabulary(model.config), packed=args.packing)
            return SCDDTrainer(data_collator=collator, **arguments)
        how: dict[str, Any] = {"complementary": args.complementary_masks, "packed": args.packing}
        if has_causal_context(model.config):
            how["causal"] = causal
        if args.edit_noise is not None:
            model.config.edit_noise = args.edit_noise  # saved with it: samplers then edit without a warning
            how["edits"] = EditNoise(args.edit_noise, *(getattr(args, name) for name in EDIT_SETTINGS))
        return dLLMTrainer(
            data_collator=dLLMDataCollator(tokenizer, block_size=block_size(model.config), **how), **arguments
        )

    return facts, make_trainer


def check_noise(args: SFTConfig, config: Any) -> None:
    """Raise ValueError for settings of another kind of noise than the model's."""
    uniform, kind = not has_masks(config), config.model_type
    of_masks: tuple[str, ...] = ("packing", "complementary_masks", "edit_noise", "eos_padding")
    idle = of_masks if uniform else OF_CANVASES
    if has_causal_context(config):
        idle = tuple(name for name in idle if name != "causal_weight")  # which weighs the clean text's loss there
    for name in (name for name in idle if getattr(args, name) != getattr(SFTConfig, name)):
        noise = "has uniform noise, in canvases that EOS fills" if uniform else "hides tokens by masks"
        raise ValueError(f"--{name} {getattr(args, name)} would do nothing: {kind} {noise}")
    if args.noise == "scdd":
        check_scdd(args, config)


def check_scdd(args: SFTConfig, config: Any) -> None:
    """Raise ValueError if `--noise scdd` does not suit the model or another setting."""
    kind, attention = config.model_type, attention_name(config)
    if not has_masks(config) or attention != "full":
        raise ValueError(
            f"--noise scdd needs masks and full attention, and {kind} has "
            f"{f'{attention} attention' if has_masks(config) else 'uniform noise alone'}: leave --noise out"
        )
    if args.edit_noise is not None:
        raise ValueError(f"--edit_noise {args.edit_noise} is another noise than --noise scdd: use one of them")
    if args.complementary_masks:
        raise ValueError("--complementary_masks hides what a first draw left visible, and --noise scdd also replaces")


def kept_step(folder: Path, keep_last: bool) -> list[str]:
    """The line with the step whose weights a finished run saved, and the losses that decided; none without losses."""
    state = read_state(folder)
    losses = {entry["step"]: entry["eval_loss"] for entry in state.log_history if "eval_loss" in entry}
    best, last = state.best_global_step, max(losses, default=0)
    if not best or best not in losses:
        return []
    rows = json.loads((folder / RECORD).read_text())["settings"].get("held_out_rows", "the")
    saved = state.global_step if keep_last else best
    seen = ", ".join(f"{losses[step]:.4f} at step {step}" for step in dict.fromkeys((best, last)))
    hint = "" if saved == state.global_step else "; --keep_last saves those of the last step"
    return [f"Saved: the weights of step {saved} of {state.global_step}. Loss on {rows} held-out rows: {seen}{hint}."]
