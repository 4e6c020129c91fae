"""The loss of distillation, and logits at chosen positions of chosen states.

n is the number of positions of a micro-batch. The loss of an optimizer step is a mean over all of its micro-batches and
processes: `totals` are the counts that it divides by.
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

ReadLogits = Callable[..., tuple[Tensor, ...]]  # (logits, *columns) -> tensors of each position


@dataclass(frozen=True)
class NoisedTexts:
    """Texts in several states, and the positions of their canvas to read there, in the order of `nonzero`."""

    ids: Tensor  # (rows, prompt + canvas) clean
    visible: Tensor  # (rows, prompt + canvas), 0 at padding
    noise: Tensor  # (rows, states, canvas) bool, what each state hides of the canvas; the prompt is always shown
    positions: Tensor  # (rows, states, canvas) bool, on the host


def read_positions(
    model: Any,
    texts: NoisedTexts,
    read: ReadLogits,
    columns: Sequence[Tensor] = (),
    *,
    mask_token_id: int,
    states_at_once: int = 1,
) -> tuple[tuple[Tensor, ...], Tensor]:
    """What `read(logits, *columns)` returns for the positions of `texts`, and the compute, as in `d1.scoring.Scores`.

    Only states with a position are computed. With gradients and several passes, the backward pass recomputes each pass,
    so that memory does not grow with the number of states.

    Args:
        read: gets logits (positions, vocabulary), fp32 or fp64, and the same positions of the columns; returns tensors
            (positions, ...).
        columns: values of each position, (positions, ...) each.
        states_at_once: of each row per forward pass, on average.
    """
    positions = texts.positions
    canvas = positions.shape[-1]
    total = int(positions.sum())
    has_padding = padding_mask(texts.visible) is not None  # even a mask that hides nothing excludes fast kernels
    with_gradients = torch.is_grad_enabled()

    # A pass computes some (row, state) pairs, in the order of `positions.nonzero()`.
    pairs = pairs_to_score(positions)  # (pairs, 2)
    passes = list(pairs.split(len(positions) * states_at_once))
    # Processes stay in step by repeating the last pair, whose positions are cut off below.
    repeated = calls_in_step(model, len(passes)) - len(passes)
    passes += [pairs[-1:]] * repeated

    def forward(pass_pairs: Tensor, *pass_columns: Tensor) -> tuple[Tensor, ...]:
        row, state = pass_pairs.to(texts.ids.device).unbind(1)
        shown_prompt = torch.zeros_like(texts.visible[row, :-canvas]).bool()
        hidden = torch.cat([shown_prompt, texts.noise[row, state]], dim=1)
        states = hidden_states(
            model,
            texts.ids[row],
            hidden,
            texts.visible[row] if has_padding else None,
            gen_length=canvas,
            mask_token_id=mask_token_id,
        )
        read_at = positions[pass_pairs.unbind(1)].flatten().nonzero().squeeze(1)
        read_at = read_at.to(texts.ids.device, non_blocking=True)
        return read_logits(model, states[:, -canvas:].flatten(0, 1)[read_at], read, pass_columns)

    run: Callable[..., Any] = forward
    if with_gradients and len(passes) > 1:
        run = partial(checkpoint, forward, use_reentrant=False)

    results, end = [], 0
    for pass_pairs in passes:
        size = int(positions[pass_pairs.unbind(1)].sum())
        end = min(end + size, total)  # a repeated pass reads the last positions again
        results.append(run(pass_pairs, *(column[end - size : end] for column in columns)))
    joined = tuple(torch.cat(parts)[:total] for parts in zip(*results, strict=True))

    # A backward pass costs two forward passes; the pair of a batch without positions costs nothing.
    passes_per_pair = 3 if with_gradients else 1
    computed_rows = pairs[:, 0] if total else pairs[:0, 0]
    visible = texts.visible[computed_rows.to(texts.visible.device)]
    return joined, passes_per_pair * tokens_of_pass(model, visible, canvas)


def read_logits(model: Any, states: Tensor, read: ReadLogits, columns: Sequence[Tensor]) -> tuple[Tensor, ...]:
    """`read` of the logits of `states` (n, hidden), with at most one chunk of logits in memory."""
    head = backbone_and_head(model)[1]

    def read_chunk(states: Tensor, *chunk_columns: Tensor) -> tuple[Tensor, ...]:
        logits = head(states)
        if logits.dtype != torch.float64:
            logits = logits.float()
        return read(logits, *chunk_columns)

    chunks = -(-len(states) * model.config.vocab_size // CHUNK_ELEMENTS)
    calls = calls_in_step(model, chunks)
    run: Callable[..., Any] = read_chunk
    if torch.is_grad_enabled() and calls > 1:
        run = partial(checkpoint, read_chunk, use_reentrant=False)

    split_inputs = [values.tensor_split(calls) for values in (states, *columns)]
    results = [run(*chunk) for chunk in zip(*split_inputs, strict=True)]
    return tuple(torch.cat(parts) for parts in zip(*results, strict=True))


# --- dParallel's loss -------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class ScoredPositions:
    """The positions of a micro-batch."""

    state: Tensor  # (n,) the number of each position's state, 0 or 1
    ids: Tensor  # (n,) the tokens of the trace
    right: Tensor  # (n,) bool, whether that token is the most likely one, before the optimizer step


def is_most_likely(logits: Tensor, ids: Tensor) -> tuple[Tensor]:
    """(n,) bool: whether the token of the trace is the most likely one."""
    return (logits.argmax(-1) == ids,)


def read_certainty(logits: Tensor, ids: Tensor, temperature: float) -> tuple[Tensor, Tensor]:
    """(n,) log-probabilities of the trace's tokens, and (n,) entropies in nats at the `temperature`."""
    return token_logps(logits, ids), token_entropies(logits / temperature)


def count_positions(scored: ScoredPositions) -> Tensor:
    """(2, states): the positions of each state, and of these the right ones."""
    positions = torch.bincount(scored.state, torch.ones_like(scored.right), minlength=2)
    right_positions = torch.bincount(scored.state, scored.right, minlength=2)
    return torch.stack([positions, right_positions])


def certainty_loss(
    scored: ScoredPositions, logps: Tensor, entropies: Tensor, totals: Tensor, entropy_weight: float
) -> Tensor:
    """dParallel (section 4): for each of the two states, the mean cross-entropy of the trace's tokens plus the weighted
    mean entropy, at a temperature below 1, of positions where that token is already the most likely one.

    Args:
        logps: (n,), with gradients, as `read_certainty` returns them.
        entropies: (n,), with gradients.
        totals: (2, states) `count_positions` of the whole optimizer step.
    """
    # The weight of each position in the mean of its state, over all positions and over the right ones.
    weights = (1 / totals.clamp(min=1)).to(logps.dtype)  # (2, states)
    position_weights, right_weights = weights[:, scored.state]

    cross_entropy = -(logps * position_weights).sum()
    entropy = (entropies * scored.right * right_weights).sum()
    return cross_entropy + entropy_weight * entropy
