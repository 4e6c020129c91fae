"""Which token sees which, and where each one stands."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from transformers import (
    PreTrainedModel,
)


def count_positions(mask: Tensor) -> Tensor:
    """Position ids (rows, length) that count the real tokens of `mask` only."""
    return (mask.long().cumsum(-1) - 1).clamp(min=0)


def mask_per_query(visible: Tensor, queries: int) -> Tensor:
    """(rows, keys) -> (rows, 1, queries, keys) bool, without a copy: every query of a row sees its `visible` keys."""
    return visible.bool()[:, None, None].expand(-1, -1, queries, -1)


def place_tokens(body: PreTrainedModel, args: tuple, kwargs: dict[str, Any]) -> tuple[tuple, dict[str, Any]]:
    """Forward pre-hook of the body: position ids count real tokens only, so padding cannot move a row."""
    mask = kwargs.get("attention_mask")
    if kwargs.get("position_ids") is not None or (mask is not None and mask.dim() != 2):
        return args, kwargs
    if mask is None:
        ids = kwargs.get("input_ids", args[0] if args else None)
        mask = torch.ones_like((kwargs["inputs_embeds"][..., 0] if ids is None else ids), dtype=torch.long)
    # RoBERTa's table of positions starts after the row of its padding token.
    first = body.config.pad_token_id + 1 if body.config.model_type == "roberta" else 0
    kwargs["position_ids"] = count_positions(mask) + first
    return args, kwargs


def real_before(mask: Tensor | None, tokens: Tensor) -> Tensor:
    """The index of the real token before each of `tokens` (rows, length, ...), for models that predict the next one.

    A row's first real token has nobody before it and is its own, as in Dream's published sampler. With a cache the mask
    covers it too: the tokens of this pass are its last columns.
    """
    rows, length = tokens.shape[:2]
    index = torch.arange(length, device=tokens.device).expand(rows, length)
    seen = index if mask is None else torch.where(mask[:, -length:].bool(), index, -1).cummax(-1).values
    before = torch.cat([seen.new_full((rows, 1), -1), seen[:, :-1]], dim=1)
    return torch.where(before < 0, index, before)


def seen_keys(mask: Tensor | None) -> Tensor | None:
    """(rows, keys) of a mask that may be spread over the queries already, (rows, 1, queries, keys)."""
    return mask if mask is None or mask.dim() == 2 else mask[:, 0, 0]


def align_positions(body: PreTrainedModel, args: tuple, kwargs: dict[str, Any]) -> tuple[tuple, dict[str, Any]]:
    """Forward pre-hook of a body that predicts the next token: states are asked for one real token earlier."""
    positions = kwargs.get("state_positions")
    if positions is not None:
        before = real_before(seen_keys(kwargs.get("attention_mask")), kwargs["input_ids"])
        kwargs["state_positions"] = before.gather(1, positions)
    return args, kwargs


def align_states(body: PreTrainedModel, args: tuple, kwargs: dict[str, Any], output: Any) -> Any:
    """Forward hook of a body that predicts the next token: state i becomes that of the real token before i."""
    if kwargs.get("state_positions") is None:
        states = output[0]
        before = real_before(seen_keys(kwargs.get("attention_mask")), states)
        output.last_hidden_state = states.gather(1, before[..., None].expand_as(states))
    return output


def keep_states(body: PreTrainedModel, args: tuple, kwargs: dict[str, Any], output: Any) -> Any:
    """Forward hook of an encoder's body: `logits_to_keep`, which Transformers gives to decoders only."""
    keep = kwargs.get("logits_to_keep", 0)
    if isinstance(keep, Tensor):
        output.last_hidden_state = output[0][:, keep]
    elif keep:
        output.last_hidden_state = output[0][:, -keep:]
    return output


PREPARED = "d1_prepared"  # the attribute of a model that `attach_hooks` has made one of ours


def require_prepared(model: Any) -> None:
    """Raises ValueError for a model that was not prepared for this library, and says how to prepare it."""
    inner = model.get_base_model() if hasattr(model, "get_base_model") else model
    if not getattr(inner, PREPARED, False):
        raise ValueError(
            f"this {type(inner).__name__} was not prepared for masked diffusion: its attention may be causal, and "
            "padding would move its tokens. Load it with d1.models.load_model(path), or call "
            "d1.models.attach_hooks(model) on one that you built"
        )
