"""The hooks that `prepare` puts on a model without its head (the body, Transformers' `base_model`).

They provide positions and masks, and align states to the token they score.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel

from d1.models.attention import Tokens, attention_of, check_attention, count_positions
from d1.models.kinds import kind_of


def fed_tokens(args: tuple, kwargs: dict[str, Any]) -> Tensor:
    """One value (rows, length) per token in the arguments of a forward pass: its id, or the first of its embedding."""
    ids = kwargs.get("input_ids", args[0] if args else None)
    return kwargs["inputs_embeds"][..., 0] if ids is None else ids


def attend(body: PreTrainedModel, args: tuple, kwargs: dict[str, Any]) -> tuple[tuple, dict[str, Any]]:
    """Forward pre-hook of the body: adds position ids and, if attention is not full, the mask over queries.

    With `noised=n`, the last n tokens are noised copies of the n before them, and the mask given is that of the clean
    tokens.
    """
    check_attention(body.config, type(body).__name__)
    attention, noised, mask = attention_of(body.config), kwargs.pop("noised", 0), kwargs.get("attention_mask")
    if "texts" in kwargs or (mask is not None and len(mask.shape) != 2):  # a packed row, or a mask from the sampler
        return args, kwargs
    fed = fed_tokens(args, kwargs)
    visible = torch.ones_like(fed[:, noised:], dtype=torch.long) if mask is None else mask
    if kwargs.get("position_ids") is None:
        places = count_positions(visible)
        places = torch.cat([places, places[:, -noised:]], dim=1) if noised else places
        kwargs["position_ids"] = places + first_position(body.config)
    if attention.sees is None:
        return args, kwargs
    if noised:
        kwargs["token_before"] = before_in_two_streams(visible, noised, body.config.block_size)
    else:
        kwargs["token_before"] = real_before(visible, fed)
    kwargs["attention_mask"] = attention.mask_for(body, Tokens.of_rows(visible, noised), fed.shape[1])
    return args, kwargs


def first_position(config: Any) -> int:
    """The position id of place 0."""
    return config.pad_token_id + 1 if kind_of(config).positions_after_padding else 0


def before_in_two_streams(visible: Tensor, noised: int, size: int) -> Tensor:
    """`real_before` (rows, keys + noised), with noised copies of the last keys: the token before the first noised one
    of a block is clean."""
    before, block = real_before(visible, visible), count_positions(visible) // size
    is_noised = (block.gather(1, before) == block) & (before >= visible.shape[1] - noised)  # in the copy
    return torch.cat([before, torch.where(is_noised, before + noised, before)[:, -noised:]], dim=1)


def real_before(mask: Tensor | None, tokens: Tensor) -> Tensor:
    """The index of the real token before each of `tokens` (rows, length, ...), for models that predict the next one.

    The first real token of a row gets its own index, as in Dream's published sampler. With a cache, the tokens of this
    pass are the last columns of the mask.
    """
    rows, length = tokens.shape[:2]
    index = torch.arange(length, device=tokens.device).expand(rows, length)
    seen = index if mask is None else torch.where(mask[:, -length:].bool(), index, -1).cummax(-1).values
    before = torch.cat([seen.new_full((rows, 1), -1), seen[:, :-1]], dim=1)
    return torch.where(before < 0, index, before)


def tokens_before(kwargs: dict[str, Any], tokens: Tensor) -> Tensor:
    """`real_before` of the `tokens`, which `attend` or `place_packed` may have computed already."""
    known, mask = kwargs.get("token_before"), kwargs.get("attention_mask")
    if known is not None:
        return known  # type: ignore[no-any-return]
    if mask is not None and mask.dim() > 2:  # over queries: each real token is seen, at least by itself
        mask = (mask if mask.dtype == torch.bool else mask == 0)[:, 0].any(1)
    return real_before(mask, tokens)


def align_positions(body: PreTrainedModel, args: tuple, kwargs: dict[str, Any]) -> tuple[tuple, dict[str, Any]]:
    """Forward pre-hook of a body that predicts the next token: takes the states of one real token earlier."""
    positions = kwargs.get("state_positions")
    if positions is not None:
        kwargs["state_positions"] = tokens_before(kwargs, kwargs["input_ids"]).gather(1, positions)
    return args, kwargs


def align_states(body: PreTrainedModel, args: tuple, kwargs: dict[str, Any], output: Any) -> Any:
    """Forward hook of a body that predicts the next token: state i becomes that of the real token before i."""
    if kwargs.get("state_positions") is None:
        states = output[0]
        before = tokens_before(kwargs, states)
        output.last_hidden_state = states.gather(1, before[..., None].expand_as(states))
    return output


def keep_states(body: PreTrainedModel, args: tuple, kwargs: dict[str, Any], output: Any) -> Any:
    """Forward hook of an encoder's body: adds `logits_to_keep`, which Transformers has for decoders only."""
    keep = kwargs.get("logits_to_keep", 0)
    if isinstance(keep, Tensor):
        output.last_hidden_state = output[0][:, keep]
    elif keep:
        output.last_hidden_state = output[0][:, -keep:]
    return output
