"""Read a model's logits at chosen places of chosen states, a few states and a few logits at a time."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from d1.models.attention import padding_mask
from d1.models.head import CHUNK_ELEMENTS, body_and_head, calls_in_step
from d1.scoring.views import hidden_states, noised_tokens, pairs_to_score

Read = Callable[..., tuple[Tensor, ...]]


@dataclass(frozen=True)
class Seen:
    """Texts in several states, and the places of their canvas to read there.

    Attributes:
        ids: (rows, prompt + canvas) clean.
        visible: (rows, prompt + canvas), 0 at padding.
        noise: (rows, states, canvas) bool, what each state hides of the canvas; the prompt is always shown.
        places: (rows, states, canvas) bool, on the host. Everything that is read has the order of `places.nonzero()`.
    """

    ids: Tensor
    visible: Tensor
    noise: Tensor
    places: Tensor


def read_places(
    model: Any, seen: Seen, read: Read, columns: Sequence[Tensor] = (), *, mask_token_id: int, states_at_once: int = 1
) -> tuple[tuple[Tensor, ...], Tensor]:
    """What `read(logits, *columns)` returns for the places of `seen`, and the compute, as in `d1.scoring.Scores`.

    Only states with a place are computed. With gradients and several passes, the backward pass recomputes each pass,
    so that memory does not grow with the number of states.

    Args:
        model: from `d1.models.load_model`.
        read: gets logits (places, vocabulary), fp32 or fp64, and the same places of the columns; returns tensors
            (places, ...).
        columns: (places, ...) each.
        states_at_once: of each row per forward pass, on average.
    """
    places, canvas = seen.places, seen.places.shape[-1]
    padded = padding_mask(seen.visible) is not None  # even a mask that hides nothing excludes fast kernels
    pairs = pairs_to_score(places)
    passes = list(pairs.split(len(places) * states_at_once))
    passes += [pairs[-1:]] * (calls_in_step(model, len(passes)) - len(passes))  # keep processes in step; cut off below
    sizes = [int(places[some.unbind(1)].sum()) for some in passes]
    total = int(places.sum())
    ends = torch.tensor(sizes).cumsum(0).clamp(max=total).tolist()

    def compute(some: Tensor, *own: Tensor) -> tuple[Tensor, ...]:
        row, state = some.to(seen.ids.device).unbind(1)
        hidden = torch.cat([torch.zeros_like(seen.visible[row, :-canvas]).bool(), seen.noise[row, state]], dim=1)
        options: dict[str, Any] = {"gen_length": canvas, "mask_token_id": mask_token_id}
        states = hidden_states(model, seen.ids[row], hidden, seen.visible[row] if padded else None, **options)
        at = places[some.unbind(1)].flatten().nonzero().squeeze(1).to(seen.ids.device, non_blocking=True)
        return read_logits(model, states[:, -canvas:].flatten(0, 1)[at], read, own)

    recompute = torch.is_grad_enabled() and len(passes) > 1
    run: Callable[..., Any] = partial(checkpoint, compute, use_reentrant=False) if recompute else compute
    found = []
    for some, size, end in zip(passes, sizes, ends, strict=True):
        found.append(run(some, *(column[end - size : end] for column in columns)))
    joined = tuple(torch.cat(parts)[:total] for parts in zip(*found, strict=True))
    each, paid = 3 if torch.is_grad_enabled() else 1, pairs[:, 0] if total else pairs[:0, 0]
    fed = seen.visible[paid.to(seen.visible.device)]
    again = noised_tokens(model, canvas)
    return joined, each * (fed.sum() + (fed[:, -again:].sum() if again else 0))


def read_logits(model: Any, states: Tensor, read: Read, columns: Sequence[Tensor]) -> tuple[Tensor, ...]:
    """`read` of the logits of `states` (n, hidden), with at most one chunk of logits in memory."""
    head = body_and_head(model)[1]

    def chunk(states: Tensor, *own: Tensor) -> tuple[Tensor, ...]:
        logits = head(states)
        return read(logits if logits.dtype == torch.float64 else logits.float(), *own)

    calls = calls_in_step(model, -(-len(states) * model.config.vocab_size // CHUNK_ELEMENTS))
    parts = zip(*(values.tensor_split(calls) for values in (states, *columns)), strict=True)
    recompute = torch.is_grad_enabled() and calls > 1
    run: Callable[..., Any] = partial(checkpoint, chunk, use_reentrant=False) if recompute else chunk
    return tuple(map(torch.cat, zip(*(run(*part) for part in parts), strict=True)))
