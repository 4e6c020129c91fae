"""A rollout's canvases, joined from parts and as estimators see them."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import fields
from typing import Any

import torch
from torch import Tensor

from d1.models.kinds import block_size
from d1.rl.updates import Batch, fitted
from d1.sampling import Rollout
from d1.scoring import SampledRows
from d1.scoring.rollouts import blocks_of


def joined(parts: Iterable[Rollout]) -> Rollout:
    """The rows of several rollouts in one."""
    columns = zip(*([getattr(part, field.name) for field in fields(Rollout)] for part in parts), strict=True)
    return Rollout(*map(torch.cat, columns))


def special_tokens(prompt_ids: Tensor, tokenizer: Any) -> Tensor:
    """(rows, prompt) bool, the tokenizer's special tokens."""
    # Those without a role of their own are only flagged, such as LLaDA's header tokens.
    flagged = [index for index, token in tokenizer.added_tokens_decoder.items() if token.special]
    return torch.isin(prompt_ids, torch.tensor([*tokenizer.all_special_ids, *flagged], device=prompt_ids.device))


def sampled_rows(batch: Batch, config: Any, protect_specials_of: Any | None = None) -> SampledRows:
    """What estimators may know of a batch that a model of this config sampled; special tokens of a tokenizer can be
    kept from being hidden."""
    maskable = batch["prompt_mask"].bool()
    if protect_specials_of is not None:
        maskable &= ~special_tokens(batch["prompt_ids"], protect_specials_of)
    return SampledRows(
        prompt_ids=batch["prompt_ids"],
        attention_mask=batch["prompt_mask"],
        maskable=maskable,
        completion_ids=batch["canvas_ids"],
        scored=fitted(batch["completion_mask"], batch["canvas_ids"].shape[1]).bool(),
        reveal_steps=batch["reveal_steps"],
        logps=batch["rollout_logps"],
        entropies=batch["rollout_entropies"],
        blocks=blocks_of(batch["prompt_mask"], batch["canvas_ids"].shape[1], block_size(config)),
    )
