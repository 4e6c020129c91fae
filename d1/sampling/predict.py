"""The token that a step predicts at each hidden position (logits, guidance, noise), its log-prob and entropy."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Generator, Tensor

from d1.models import head
from d1.models.distribution import MODEL_DISTRIBUTION
from d1.models.kinds import vocabulary
from d1.sampling.reveal import RULES
from d1.sampling.settings import SamplingSettings

Generators = Generator | Sequence[Generator] | None


def uniform(shape: Sequence[int], generator: Generators, like: Tensor, counts: Sequence[int] | None = None) -> Tensor:
    """Uniform numbers in [0, 1) with the dtype and device of `like`: (rows, positions, ...). With one generator per
    row, each row draws for its first `counts` positions only, and the other positions hold 0.5.

    On a GPU, the numbers of one call differ from those of two calls for its halves. So each call draws for as many
    positions as a chunk has on a CPU, and the numbers depend on no card.
    """
    rows, positions = shape[:2]
    numbers = like.new_empty(tuple(shape))
    if not counts:
        counts = [positions] * rows
    for chunk_rows, chunk_positions in chunks(rows, max(1, positions), math.prod(shape[2:])):
        chunk = numbers[chunk_rows, chunk_positions]

        # One generator for all rows
        if generator is None or isinstance(generator, Generator):
            if generator is None or generator.device == like.device:
                chunk.uniform_(generator=generator)  # what torch.rand draws, without a copy
            else:
                drawn = torch.rand(chunk.shape, generator=generator, device=generator.device, dtype=like.dtype)
                chunk.copy_(drawn, non_blocking=True)
            continue

        # One per row, which draws for the first `counts` positions of the row
        for row, row_generator, count in zip(chunk, generator[chunk_rows], counts[chunk_rows], strict=True):
            draws = min(max(count - chunk_positions.start, 0), len(row))
            drawn = torch.rand(
                (draws, *shape[2:]), generator=row_generator, device=row_generator.device, dtype=like.dtype
            )
            row[:draws].copy_(drawn, non_blocking=True)
            row[draws:] = 0.5
    return numbers


def chunks(rows: int, positions: int, elements: int, factor: int = 1) -> Iterator[tuple[slice, slice]]:
    """Chunks of (rows, positions) with this many `elements` per position: whole rows, or a part of one row. They have
    half as many elements as in scoring, because the noise of a draw is as large as its logits.

    `factor`: that of `head.chunk_factor`. A larger chunk begins where a smaller one does.
    """
    at_once = max(1, head.CHUNK_ELEMENTS // 2 // elements)
    rows_at_once = at_once // positions * factor
    if rows_at_once == 0:
        rows_at_once = max(1, at_once * factor // positions)
    for first in range(0, rows, rows_at_once):
        for start in range(0, positions, at_once * factor):
            yield slice(first, first + rows_at_once), slice(start, start + at_once * factor)


def draw_ids(
    logits: Tensor,
    temperature: float,
    generator: Generators = None,
    noise_dtype: torch.dtype = torch.float32,
    counts: Sequence[int] | None = None,
) -> Tensor:
    """argmax(logits + temperature * Gumbel noise), a draw from softmax(logits / temperature): (rows, positions).

    `logits` are (rows, positions, vocab), `counts` as in `uniform`. Noise in lower precision than float32 is refused:
    it loses its tail, which sharpens the distribution (arXiv 2409.02908).
    """
    if noise_dtype not in (torch.float32, torch.float64):
        raise ValueError(f"Gumbel noise must be drawn in float32 or float64, got {noise_dtype}")
    if temperature == 0:
        return logits.argmax(-1)
    logits = logits.to(noise_dtype)
    # torch.rand gives multiples of eps/2, zero included; zero, where the log diverges, is replaced by half a grid cell.
    grid = torch.finfo(noise_dtype).eps / 2
    exponential = uniform(logits.shape, generator, logits, counts).clamp_(min=grid / 2).neg_().log1p_().neg_()
    # On a CPU `max` finds the index in less than half of argmax's time.
    return exponential.log_().mul_(-temperature).add_(logits).max(-1).indices


def compute_entropies(logits: Tensor, log_normaliser: Tensor) -> Tensor:
    """Entropies in nats (rows, n) of logits (rows, n, vocab), given their logsumexp; a few positions at a time: on a
    CPU, they stay in its cache."""
    factor = head.chunk_factor(logits.device)
    elements = head.CHUNK_ELEMENTS // (16 if factor == 1 else 4) * factor
    at_once = max(1, elements // logits.shape[-1])
    chunks_of_logits = logits.flatten(0, 1).split(at_once)
    chunks_of_normalisers = log_normaliser.flatten().split(at_once)
    entropies = []
    for chunk, normaliser in zip(chunks_of_logits, chunks_of_normalisers, strict=True):
        logps = chunk - normaliser.unsqueeze(-1)
        entropies.append(logps.exp().mul_(logps).sum(-1).neg_())
    return torch.cat(entropies).view_as(log_normaliser)


def predict(
    model: Any,
    states: Tensor,
    counts: Sequence[int],
    settings: SamplingSettings,
    mask_token_id: int,
    generator: Generators,
    noise_dtype: torch.dtype,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """A token for each position, its log-probability, the entropy there, and the log-probability to record, which is
    that under `settings.record_distribution`: (rows, n) each.

    The head runs on a bounded number of positions at a time: whole rows, or parts of one row, so that a row's random
    numbers do not depend on its batch.

    Args:
        states: (branches, rows, n, hidden): the conditional branch and, with guidance, the unconditional one.
        counts: how many of the n positions each row needs; random numbers are drawn for these only.
    """
    branches, rows, n = states.shape[:3]
    ids = torch.empty(rows, n, dtype=torch.long, device=states.device)
    logps, entropies, record_logps = torch.empty(3, rows, n, device=states.device)
    run_head = head.backbone_and_head(model)[1]
    for chunk in chunks(rows, n, vocabulary(model.config), head.chunk_factor(states.device)):
        chunk_rows, chunk_positions = chunk

        # The logits, (branches, chunk rows, chunk positions, vocab), and of these (chunk rows, chunk positions, vocab).
        chunk_states = states[:, chunk_rows, chunk_positions]
        logits = run_head(chunk_states.flatten(0, 1)).float().unflatten(0, (branches, -1))
        if branches == 1:
            logits = logits[0]
        else:
            logits = logits[1] + (settings.cfg_scale + 1) * (logits[0] - logits[1])

        # The predictions.
        generators = generator
        if isinstance(generator, Sequence):
            generators = generator[chunk_rows]
        chunk_counts = [min(max(count - chunk_positions.start, 0), logits.shape[1]) for count in counts[chunk_rows]]
        ids[chunk], logps[chunk], entropies[chunk], record_logps[chunk] = predict_from(
            logits, chunk_counts, settings, mask_token_id, generators, noise_dtype
        )
        del logits  # before the next chunk's
    return ids, logps, entropies, record_logps


def predict_from(
    logits: Tensor,
    counts: Sequence[int],
    settings: SamplingSettings,
    mask_token_id: int,
    generator: Generators = None,
    noise_dtype: torch.dtype = torch.float32,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """`predict`, from `logits` (rows, n, vocab) in fp32, which it changes."""
    plain_entropies = settings.rule is not None and RULES[settings.rule].plain_entropies
    # Greedy: one pass over the logits gives all three. The mask token is excluded from the choice, not from log p.
    if settings.temperature == 0 and not plain_entropies:
        ids, logps, entropies = head.most_likely(logits, mask_token_id)
        return ids, logps, entropies, logps

    # The model's own distribution.
    log_normaliser = logits.logsumexp(-1)
    if plain_entropies:
        entropies = head.token_entropies(logits)
    else:
        entropies = compute_entropies(logits, log_normaliser)

    # `logits` changes from here on; a distribution to record is made from the logits with the mask token.
    record_distribution, draw_distribution = settings.record_distribution, settings.draw_distribution
    logits_with_mask = logits
    if record_distribution != MODEL_DISTRIBUTION:
        logits_with_mask = logits.clone()

    # Draw. A mask token must never be drawn, not even when few are left.
    logits[..., mask_token_id] = -torch.inf
    draw_logits = logits
    if draw_distribution.truncates:
        draw_logits = draw_distribution.truncated(logits)
    ids = draw_ids(draw_logits, settings.temperature, generator, noise_dtype, counts)

    # Log-probabilities, and those to record.
    logps = logits.gather(-1, ids.unsqueeze(-1)).squeeze(-1) - log_normaliser
    record_logps = logps
    if record_distribution != MODEL_DISTRIBUTION:
        record_logps = head.token_logps(record_distribution.logits(logits_with_mask, ids), ids)
    return ids, logps, entropies, record_logps
