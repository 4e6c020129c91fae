"""Preference training as a `Stage` of `d1.runs.stage`: its rows, its trainer, and what a resume may change."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from typing import Any

from transformers import TrainingArguments

from d1.models.attention import refuse_causal_context
from d1.models.folder import ModelFolder
from d1.models.kinds import block_size, check_room, require_masks
from d1.preference.config import PreferenceConfig
from d1.preference.data import PreferenceCollator, PreferenceDataset, token_rows
from d1.preference.methods import METHODS
from d1.preference.trainer import PreferenceTrainer
from d1.runs.data import load_rows
from d1.runs.record import ROWS, hash_rows
from d1.runs.stage import Stage, cap_batch, on_resume, prepare_model, stage_of, trainer_arguments
from d1.scoring import ESTIMATORS, ViewSettings

logger = logging.getLogger(__name__)

ON_RESUME = on_resume(
    # The rows and the views.
    "max_prompt_length",
    "max_completion_length",
    "estimator",
    "num_views",
    "spread",
    "antithetic",
    # The loss and the reference.
    "method",
    "beta",
    "adam_beta2",
    free=("save_steps", "views_at_once"),
)


def stage(args: PreferenceConfig) -> Stage:
    training, folder = trainer_arguments(
        args, save_steps=args.save_steps, adam_beta2=args.adam_beta2, eval_strategy="no"
    )
    return stage_of(args, training, folder, prepare, ON_RESUME)


def prepare(
    args: PreferenceConfig, training: TrainingArguments, tokenizer: Any, folder: ModelFolder
) -> tuple[Mapping[str, Any], Callable[[Any], PreferenceTrainer]]:
    """The method's paper and the fingerprint of the run's rows, and a function that makes the trainer of a model."""
    config = folder.config
    refuse_causal_context(config, "preference training")
    require_masks(config, "preference training")
    method = METHODS[args.method]
    with training.main_process_first(local=False, desc="tokenising"):  # the others read its cache
        rows = token_rows(
            load_rows(args.train_data),
            tokenizer,
            args.max_prompt_length,
            args.max_completion_length,
            paired=method.paired,
            bad_rows=args.bad_rows,
            num_proc=args.num_proc,
        )
    longest = max(map(len, rows["prompt_ids"]))
    check_room(config, longest, args.max_completion_length, ": lower --max_prompt_length or --max_completion_length")
    cap_batch(training, len(rows))
    estimator = ESTIMATORS[str(args.estimator)]
    settings = ViewSettings(
        gen_length=args.max_completion_length,
        num_views=args.num_views,
        antithetic=args.antithetic,
        stratified=args.spread == "even",
    )
    if training.should_save:
        kind = "pairs" if method.paired else "completions"
        logger.info("%d %s, %d views of each completion", len(rows), kind, estimator.views(settings))

    def make_trainer(model: Any) -> PreferenceTrainer:
        return PreferenceTrainer(
            method=method,
            beta=float(args.beta or 0),
            mask_token_id=tokenizer.mask_token_id,
            reference=prepare_model(args, folder).requires_grad_(False) if args.full_finetuning else None,
            views_at_once=args.views_at_once,
            model=model,
            args=training,
            data_collator=PreferenceCollator(tokenizer, estimator, settings, block_size(model.config)),
            train_dataset=PreferenceDataset(rows, args.seed),
            processing_class=tokenizer,
        )

    return {"paper": method.paper, ROWS + "train_data": hash_rows(rows)}, make_trainer
