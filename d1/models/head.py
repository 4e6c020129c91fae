"""Of what follows the last keys and values, only the positions matter whose logits are asked for.

A decoder's last layer feeds nothing but the head: its keys and values are needed of all positions, its queries,
attention output and feed-forward of those alone (`narrow`). The head's product with a wide vocabulary then has few
rows, and what is made of its logits need not hold them all (`in_parts`).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch
from peft import PeftModel
from torch import Tensor
from transformers.models.llama.modeling_llama import rotate_half

from d1.models.fast_cpu import in_parts
from d1.models.kinds import DECODERS


def can_narrow(model: Any) -> bool:
    """Whether the body of `model` takes `state_positions` (rows, n) and gives the states at these alone.

    Kernels other than these two read masks and windows in ways of their own, and checkpointed layers take no cache.
    """
    return (
        model.config.model_type in DECODERS
        and getattr(model.config, "_attn_implementation", None) in ("sdpa", "eager")
        and not (model.training and model.is_gradient_checkpointing)
    )


class AllKeys:
    """What `narrow` gives a layer for its cache: in place of the keys and values of its few queries, those of all."""

    def __init__(self, keys: Tensor, values: Tensor) -> None:
        self.keys, self.values = keys, values

    def update(self, keys: Tensor, values: Tensor, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
        return self.keys, self.values


def narrow(layer: Any, args: tuple, kwargs: dict[str, Any]) -> tuple[tuple, dict[str, Any]]:
    """Forward pre-hook of a body's last layer: only `state_positions` (rows, n), if given, go through it.

    The layer's own code runs, under whatever wraps it; its keys are rebuilt here from its own modules.
    """
    positions = kwargs.pop("state_positions", None)
    if positions is None:
        return args, kwargs
    attention, states, (cos, sin) = layer.self_attn, args[0], kwargs["position_embeddings"]
    normed = layer.input_layernorm(states)
    keys, values = (
        project(normed).unflatten(-1, (-1, attention.head_dim)).transpose(1, 2)
        for project in (attention.k_proj, attention.v_proj)
    )
    if hasattr(attention, "k_norm"):
        keys = attention.k_norm(keys)
    keys = keys * cos.unsqueeze(1) + rotate_half(keys) * sin.unsqueeze(1)
    past, mask = kwargs.get("past_key_values"), kwargs.get("attention_mask")
    if past is not None:
        keys, values = past.update(keys, values, attention.layer_idx)
    at = positions.unsqueeze(-1)
    kwargs |= {
        "past_key_values": AllKeys(keys, values),
        "position_embeddings": (torch.take_along_dim(cos, at, 1), torch.take_along_dim(sin, at, 1)),
        "position_ids": None,
        "attention_mask": None if mask is None else torch.take_along_dim(mask, at.unsqueeze(1), 2),
    }
    return (torch.take_along_dim(states, at, 1), *args[1:]), kwargs


def body_and_head(model: torch.nn.Module) -> tuple[Callable[..., Tensor], Callable[[Tensor], Tensor]]:
    """The two halves of a model of `load_model`, for scoring without the logits of every position at once.

    Returns:
        `body(input_ids, attention_mask, positions)` -> last hidden states, aligned to the token they score:
        (rows, length, hidden), or (rows, n, hidden) at each row's own `positions` (rows, n), where most decoders run
        their last layer alone.
        `head(states)` -> logits (..., vocab). `head(body(...))` equals `model(...).logits` for every kind.
    """
    inner: Any = model.get_base_model() if isinstance(model, PeftModel) else model

    def body(
        input_ids: Tensor, attention_mask: Tensor | None = None, positions: Tensor | None = None, **kwargs: Any
    ) -> Tensor:
        narrowed = positions is not None and can_narrow(inner)
        if narrowed:
            kwargs["state_positions"] = positions
        states = inner.base_model(input_ids=input_ids, attention_mask=attention_mask, **kwargs).last_hidden_state
        if positions is None or narrowed:
            return states
        return states.gather(1, positions.unsqueeze(-1).expand(-1, -1, states.shape[-1]))

    return body, lambda states: next(logit_parts(model, states, whole=True))[1]


def logit_parts(model: torch.nn.Module, states: Tensor, whole: bool = False) -> Iterator[tuple[int, Tensor]]:
    """The head of `body_and_head` in parts of the vocabulary: where each starts, and its logits (..., part)."""
    inner: Any = model.get_base_model() if isinstance(model, PeftModel) else model
    kind, cap = inner.config.model_type, getattr(inner.config, "final_logit_softcapping", None)
    if kind == "bert":
        yield 0, inner.cls(states)
    elif kind == "modernbert":
        yield 0, inner.decoder(inner.head(states))
    else:
        parts = iter([(0, inner.lm_head(states))]) if whole else in_parts(inner.lm_head, states)
        for start, logits in parts:
            yield start, logits if cap is None else torch.tanh(logits / cap) * cap
