"""The memory of an RL run, for `d1 fit` and for a trainer that asks whether a merged copy of the weights fits."""

from __future__ import annotations

import logging
from typing import Any

from peft import LoraConfig, PeftModel

from d1.commands.footprint import FitSettings, activation_bytes, resident_bytes
from d1.models.attention import has_causal_context
from d1.models.kinds import block_size, has_masks
from d1.rl.config import DiffuGRPOConfig, drawn_views, max_views
from d1.scoring import ESTIMATORS

logger = logging.getLogger(__name__)


def fields_of(args: DiffuGRPOConfig, length: int, canvas: int, block: int | None, uniform: bool) -> dict[str, Any]:
    """The fields of `FitSettings` for an RL run: views, their stored bytes, and `beta`, 0 without a reference.

    Args:
        length: tokens of a row, prompt and completion.
        canvas: tokens of the completion.
        block: tokens per block of a model with blocks.
        uniform: the model has uniform noise.
    """
    # Per update and view: one byte per token for what is hidden, and fp32 weights and log-probs on the canvas. Updates
    # that divide the views among them store all of them.
    numbers = 1 + args.needs_old_logps + args.loss_reads_reference
    # With edits or uniform noise, replay also keeps what each view shows and scores, ids of 8 bytes, and the sampler's
    # log-prob of it.
    writes = (uniform or args.edit_threshold is not None) and ESTIMATORS[args.estimator].replays_writes
    ids = 20 if writes else 0
    views = args.num_iterations * drawn_views(args, block) * int(args.steps_per_generation or 1)
    stored = views * (length + (4 * numbers + ids) * canvas)
    beta = (args.beta or 1.0) if args.needs_reference else 0.0  # a size that only has to be above 0
    return {"beta": beta, "views": max_views(args, block), "canvas": canvas, "stored": stored}


def has_room_for_copy(args: DiffuGRPOConfig, model: PeftModel, free: float) -> bool:
    """Whether a run with a merged copy of the weights takes at most 95% of the `free` bytes, which include those of the
    weights; the rest is for what the estimate does not include."""
    settings = fit_settings(args, model)
    if settings is None:
        return False
    try:
        constant, per_row = activation_bytes(model.config, settings)
        needed = sum(resident_bytes(model.config, settings).values()) + constant
    except Exception as error:  # a model of one's own may not run on fake tensors
        logger.info("No merged copy of the weights, because its memory cannot be estimated: %s", error)
        return False
    return needed + (per_row + settings.stored) * settings.batch <= 0.95 * free


def fit_settings(args: DiffuGRPOConfig, model: PeftModel) -> FitSettings | None:
    """The settings of a run with a merged copy; None for an adapter that the estimate does not know. Optimizer states
    count as if each process held all of them."""
    adapter: Any = model.peft_config[model.active_adapters[0]]
    if not isinstance(adapter, LoraConfig) or not isinstance(adapter.target_modules, set | list):
        return None
    config, canvas = model.config, int(args.max_completion_length or 0)
    length = args.max_prompt_length + canvas
    size = args.block_length if has_causal_context(config) else block_size(config)
    return FitSettings(
        stage="rl",
        batch=args.per_device_train_batch_size,
        length=length,
        block_length=int(args.block_length or 32),
        dtype=str(model.dtype).removeprefix("torch."),
        lora_r=adapter.r,
        lora_targets=sorted(adapter.target_modules),
        gradient_checkpointing=bool(args.gradient_checkpointing),
        views_at_once=args.views_at_once,
        merged_rollouts=True,
        **fields_of(args, length, canvas, size, uniform=not has_masks(config)),
    )
