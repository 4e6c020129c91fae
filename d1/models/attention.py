"""Which token sees which, and where each one stands: the only maker of masks and positions.

Masks speak of keys. `visible` (rows, keys) is 1 at every token that may be seen, 0 at padding; a mask "over queries"
is (rows, 1, queries, keys), bool, and says it for each query on its own.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel

from d1.models.kinds import is_decoder, kind_of, windowed
from d1.transformers_bridge import attention_kernel


def count_positions(mask: Tensor) -> Tensor:
    """Position ids (rows, length) that count the real tokens of `mask` only."""
    return (mask.long().cumsum(-1) - 1).clamp(min=0)


def padding_mask(visible: Tensor) -> Tensor | None:
    """`visible`, or None where it hides nothing: then attention can take its fastest kernel. Waits for the device."""
    return None if visible.all() else visible


def takes_masks_over_queries(config: Any) -> bool:
    """Whether a model passes a mask over queries on as it is.

    Transformers asks the device in every forward pass whether a mask (rows, keys) hides anything. It asks nothing about
    a mask over queries, which decoders take under sdpa unless some of their layers have a window.
    """
    return attention_kernel(config) == "sdpa" and is_decoder(config) and not windowed(config)


def over_queries(visible: Tensor, queries: int) -> Tensor:
    """The mask (rows, 1, queries, keys) of so many queries that all see the keys `visible` (rows, keys)."""
    return visible.bool()[:, None, None].expand(-1, -1, queries, -1)


def seen_keys(mask: Tensor | None) -> Tensor | None:
    """(rows, keys) of a mask that may be over queries already, all of which must see the same keys."""
    return mask if mask is None or mask.dim() == 2 else mask[:, 0, 0]


def place_tokens(body: PreTrainedModel, args: tuple, kwargs: dict[str, Any]) -> tuple[tuple, dict[str, Any]]:
    """Forward pre-hook of the body: position ids count real tokens only, so padding cannot move a row."""
    mask = kwargs.get("attention_mask")
    if kwargs.get("position_ids") is not None or (mask is not None and mask.dim() != 2):
        return args, kwargs
    if mask is None:
        ids = kwargs.get("input_ids", args[0] if args else None)
        mask = torch.ones_like((kwargs["inputs_embeds"][..., 0] if ids is None else ids), dtype=torch.long)
    first = body.config.pad_token_id + 1 if kind_of(body.config).positions_after_padding else 0
    kwargs["position_ids"] = count_positions(mask) + first
    return args, kwargs


# `Kind.attention` -> forward pre-hook of the body, which makes masks and positions from the mask it is given: of keys
# (rows, keys), None where all are seen, or already over queries, with position ids, where the sampler has made both.
ATTENTION = {"full": place_tokens}


def real_before(mask: Tensor | None, tokens: Tensor) -> Tensor:
    """The index of the real token before each of `tokens` (rows, length, ...), for models that predict the next one.

    A row's first real token has none before it and takes its own place, as in Dream's published sampler. With a cache
    the mask covers it too: the tokens of this pass are its last columns.
    """
    rows, length = tokens.shape[:2]
    index = torch.arange(length, device=tokens.device).expand(rows, length)
    seen = index if mask is None else torch.where(mask[:, -length:].bool(), index, -1).cummax(-1).values
    before = torch.cat([seen.new_full((rows, 1), -1), seen[:, :-1]], dim=1)
    return torch.where(before < 0, index, before)


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


PREPARED = "d1_prepared"  # the attribute that `d1.models.prepare` sets on a model


def require_prepared(model: Any) -> None:
    """Called where sampling, scoring and training begin.

    Raises:
        ValueError: the model was not prepared for this library, with how to prepare it; or it was released with another
            attention than it runs with here.
    """
    inner = model.get_base_model() if hasattr(model, "get_base_model") else model
    if not getattr(inner, PREPARED, False):
        raise ValueError(
            f"this {type(inner).__name__} was not prepared for masked diffusion: its attention may be causal, and "
            "padding would move its tokens. Load it with d1.models.load_model(path), or call "
            "d1.models.prepare(model) on one that you built"
        )
    size = getattr(inner.config, "block_size", None)
    if size and kind_of(inner.config).attention == "full":
        name = inner.config.name_or_path or type(inner).__name__
        raise ValueError(
            f"{name} has block-causal attention (blocks of {size}: a token "
            "sees its own block and the blocks before it). This version loads, merges, exports and estimates such a "
            "model; it does not yet sample, score or train it"
        )
