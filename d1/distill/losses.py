"""The losses of distillation: logits at chosen positions, and the targets and divergences of `METHODS`.

A target is read from the teacher's logits without gradients, a divergence from the student's. n is the number of
positions of a micro-batch. The loss of an optimizer step is a mean over all of its micro-batches and processes:
`totals` are the counts that it divides by.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from d1.models.attention import padding_mask
from d1.models.head import CHUNK_ELEMENTS, backbone_and_head, calls_in_step, token_entropies, token_logps
from d1.scoring.forward import hidden_states, tokens_of_pass
from d1.scoring.views import pairs_to_score

# --- Logits at chosen positions of chosen states ----------------------------------------------------------------------

Read = Callable[..., tuple[Tensor, ...]]


@dataclass(frozen=True)
class Seen:
    """Texts in several states, and the positions of their canvas to read there, in the order of `nonzero`."""

    ids: Tensor  # (rows, prompt + canvas) clean
    visible: Tensor  # (rows, prompt + canvas), 0 at padding
    noise: Tensor  # (rows, states, canvas) bool, what each state hides of the canvas; the prompt is always shown
    positions: Tensor  # (rows, states, canvas) bool, on the host


def read_positions(
    model: Any, seen: Seen, read: Read, columns: Sequence[Tensor] = (), *, mask_token_id: int, states_at_once: int = 1
) -> tuple[tuple[Tensor, ...], Tensor]:
    """What `read(logits, *columns)` returns for the positions of `seen`, and the compute, as in `d1.scoring.Scores`.

    Only states with a position are computed. With gradients and several passes, the backward pass recomputes each pass,
    so that memory does not grow with the number of states.

    Args:
        read: gets logits (positions, vocabulary), fp32 or fp64, and the same positions of the columns; returns tensors
            (positions, ...).
        columns: values of each position, (positions, ...) each.
        states_at_once: of each row per forward pass, on average.
    """
    positions, canvas = seen.positions, seen.positions.shape[-1]
    padded = padding_mask(seen.visible) is not None  # even a mask that hides nothing excludes fast kernels
    pairs = pairs_to_score(positions)  # (pairs, 2): row and state, in the order of `positions.nonzero()`
    passes = list(pairs.split(len(positions) * states_at_once))
    passes += [pairs[-1:]] * (calls_in_step(model, len(passes)) - len(passes))  # keep processes in step; cut off below
    sizes = [int(positions[some.unbind(1)].sum()) for some in passes]
    total = int(positions.sum())
    # Repeated passes end at `total`, too: they read the last positions again.
    ends = torch.tensor(sizes).cumsum(0).clamp(max=total).tolist()

    def compute(some: Tensor, *own: Tensor) -> tuple[Tensor, ...]:
        row, state = some.to(seen.ids.device).unbind(1)
        hidden = torch.cat([torch.zeros_like(seen.visible[row, :-canvas]).bool(), seen.noise[row, state]], dim=1)
        options: dict[str, Any] = {"gen_length": canvas, "mask_token_id": mask_token_id}
        states = hidden_states(model, seen.ids[row], hidden, seen.visible[row] if padded else None, **options)
        at = positions[some.unbind(1)].flatten().nonzero().squeeze(1).to(seen.ids.device, non_blocking=True)
        return read_logits(model, states[:, -canvas:].flatten(0, 1)[at], read, own)

    recompute = torch.is_grad_enabled() and len(passes) > 1
    run: Callable[..., Any] = partial(checkpoint, compute, use_reentrant=False) if recompute else compute
    found = []
    for some, size, end in zip(passes, sizes, ends, strict=True):
        found.append(run(some, *(column[end - size : end] for column in columns)))
    joined = tuple(torch.cat(parts)[:total] for parts in zip(*found, strict=True))
    # A backward pass costs two forward passes; the pair of a batch without positions costs nothing.
    each, paid = 3 if torch.is_grad_enabled() else 1, pairs[:, 0] if total else pairs[:0, 0]
    computed = seen.visible[paid.to(seen.visible.device)]
    return joined, each * tokens_of_pass(model, computed, canvas)


def read_logits(model: Any, states: Tensor, read: Read, columns: Sequence[Tensor]) -> tuple[Tensor, ...]:
    """`read` of the logits of `states` (n, hidden), with at most one chunk of logits in memory."""
    head = backbone_and_head(model)[1]

    def chunk(states: Tensor, *own: Tensor) -> tuple[Tensor, ...]:
        logits = head(states)
        return read(logits if logits.dtype == torch.float64 else logits.float(), *own)

    calls = calls_in_step(model, -(-len(states) * model.config.vocab_size // CHUNK_ELEMENTS))
    parts = zip(*(values.tensor_split(calls) for values in (states, *columns)), strict=True)
    recompute = torch.is_grad_enabled() and calls > 1
    run: Callable[..., Any] = partial(checkpoint, chunk, use_reentrant=False) if recompute else chunk
    return tuple(map(torch.cat, zip(*(run(*part) for part in parts), strict=True)))


# --- Targets: (settings, logits, own ids) -> tensors ------------------------------------------------------------------


@dataclass(frozen=True)
class Compared:
    """The positions of a micro-batch."""

    row: Tensor  # (n,) the number of each position's row
    state: Tensor  # (n,) and of its state
    ids: Tensor  # (n,) own tokens
    target: tuple[Tensor, ...] = ()  # what the target read, (n, ...) each


def own(settings: Any, logits: Tensor, ids: Tensor) -> tuple[Tensor, ...]:
    """Whether the own token is the most likely one."""
    return (logits.argmax(-1) == ids,)


Target = Callable[[Any, Tensor, Tensor], tuple[Tensor, ...]]
TARGETS: dict[str, Target] = {"own": own}


# --- Divergences ------------------------------------------------------------------------------------------------------


def read_certainty(settings: Any, logits: Tensor, ids: Tensor, right: Tensor) -> tuple[Tensor, ...]:
    return token_logps(logits, ids), token_entropies(logits / settings.entropy_temperature)


def count_certainty(seen: Compared) -> Tensor:
    """(2, states): the positions of each state, and of these the ones where the own token is the most likely."""
    (right,) = seen.target
    return torch.stack([torch.bincount(seen.state, each, minlength=2) for each in (torch.ones_like(right), right)])


def certainty(seen: Compared, read: tuple[Tensor, ...], totals: Tensor, settings: Any) -> Any:
    """dParallel (section 4): for each of the two states, the mean cross-entropy of the own tokens plus the weighted
    mean entropy, at a temperature below 1, of positions where the own token is already the most likely one."""
    (logps, entropies), (right,) = read, seen.target
    # Each state's weight of a position, and of one whose own token is the most likely one.
    each, every = (1 / totals.clamp(min=1)).to(logps.dtype)[:, seen.state]
    sharp = entropies * right
    loss = -(logps * each).sum() + settings.entropy_weight * (sharp * every).sum()
    return loss, {"logps/own": logps, "right": right, "entropy": entropies}


@dataclass(frozen=True)
class Divergence:
    """An entry of `DIVERGENCES`."""

    # (settings, logits, own ids, *what the target read) -> tensors of each position, with gradients
    read: Callable[..., tuple[Tensor, ...]]
    # (positions, what was read, totals, settings) -> the micro-batch's part of the loss, and its logs
    loss: Callable[..., tuple[Tensor, dict[str, Tensor]]]
    # (positions) -> counts, which are summed over the optimizer step before the loss sees them
    totals: Callable[[Compared], Tensor]


DIVERGENCES = {
    "certainty": Divergence(read_certainty, certainty, count_certainty),
}
