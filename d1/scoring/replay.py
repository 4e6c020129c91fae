"""Scoring each token in the state that the sampler was in when it revealed the token.

The sum over tokens is then the log-probability of the sampler's own trajectory, its choice of places left out: what the
rollout recorded, so that ratios start at 1. A view is a *segment* of a row's steps: single steps (CJ-GRPO, arXiv
2509.23924), `segment_steps` of them merged (TraceRL, arXiv 2509.06949), or all of them cut into `segments` (d2, arXiv
2509.21474); of a merged segment all tokens are scored in the state at its beginning. With `num_views` only so many
segments are drawn, uniformly or in proportion to the entropy of what they reveal, and each weighs by the inverse of its
chance (AGRPO, arXiv 2510.04019; d2's one segment an update): unbiased for the sum over all segments.

The end of a completion counts as a token: a completion that is only an EOS has one segment.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from d1.scoring.rollouts import Randomness, SampledRows
from d1.scoring.views import Views

DRAW_STEPS = ("uniform", "entropy")


def views(settings: Any) -> int:
    if settings.num_views:
        return settings.num_views
    return settings.segments or -(-settings.diffusion_steps // (settings.segment_steps or 1))


def segments_of(reveal_steps: Tensor, segments: int | None, segment_steps: int | None) -> Tensor:
    """(rows, canvas) the segment of each token's step; -1 for tokens that no step revealed."""
    if segments:
        steps = reveal_steps.amax(-1, keepdim=True).clamp(min=0) + 1
        merged = reveal_steps * segments // steps
    else:
        merged = reveal_steps // (segment_steps or 1)
    return merged.masked_fill(reveal_steps < 0, -1)


def replay_views(prompt: int, segments: Tensor, chosen: Tensor, weights: Tensor, scored: Tensor) -> Views:
    """A view for each of a row's `chosen` segments (rows, views), which shows what was revealed before the segment.

    Tokens behind the completion's end are shown like others: the sampler saw them, too.

    Args:
        prompt: its length; none of it is hidden.
        segments: (rows, canvas), from `segments_of`.
        weights: (rows, views), of the segment's own tokens.
    """
    place, at = segments.unsqueeze(1), chosen.unsqueeze(-1)
    hidden = (place >= at) | (place < 0)
    clean = hidden.new_zeros(*chosen.shape, prompt)
    own = (place == at) & scored.unsqueeze(1)
    return Views(torch.cat([clean, hidden], dim=-1), torch.where(own, weights.unsqueeze(-1), 0.0))


def chances(segments: Tensor, scored: Tensor, entropies: Tensor, draw_steps: str) -> Tensor:
    """(rows, segments) probability to draw each segment, 0 for those after a row's last scored token.

    By entropy, segments whose tokens were certain keep a small chance.
    """
    own = (segments.unsqueeze(1) == torch.arange(int(segments.max()) + 1, device=segments.device)[:, None]) & (
        scored.unsqueeze(1)
    )
    places = torch.arange(own.shape[1], device=own.device)
    last = torch.where(own.any(-1), places, 0).amax(-1, keepdim=True)
    weights = (own * entropies.unsqueeze(1)).sum(-1) + 1e-6 if draw_steps == "entropy" else torch.ones_like(places)
    weights = torch.where(places <= last, weights, 0).double()
    return weights / weights.sum(-1, keepdim=True)


def drawn(chance: Tensor, numbers: Tensor) -> tuple[Tensor, Tensor]:
    """The segments (rows, draws) at which uniform `numbers` fall, and their weights: 1 / (draws x chance), of a segment
    that is drawn several times the sum, at its first place.
    """
    draws = numbers.shape[1]
    chosen = torch.searchsorted(chance.cumsum(-1), numbers.double().contiguous(), right=True)
    last = (chance > 0).long().cumsum(-1).argmax(-1, keepdim=True)  # where rounding leaves the sum below a number
    chosen = chosen.minimum(last).sort(-1).values
    again = torch.cat([torch.zeros_like(chosen[:, :1]).bool(), chosen[:, 1:] == chosen[:, :-1]], dim=1)
    times = (chosen.unsqueeze(1) == chosen.unsqueeze(2)).sum(-1)
    weights = times / (draws * chance.gather(1, chosen))
    return chosen, weights.masked_fill(again, 0.0).float()


def draw(sampled: SampledRows, random: Randomness, settings: Any) -> Views:
    segments = segments_of(sampled.reveal_steps, settings.segments, settings.segment_steps)
    prompt, device = sampled.prompt_ids.shape[1], segments.device
    if settings.num_views:
        numbers = random.evenly_spread(settings.num_views).to(device)
        chance = chances(segments, sampled.scored, sampled.entropies, settings.draw_steps)
        return replay_views(prompt, segments, *drawn(chance, numbers), sampled.scored)
    count = int(segments.max()) + 1
    chosen = torch.arange(count, device=device).expand(len(segments), -1)
    return replay_views(prompt, segments, chosen, torch.ones_like(chosen, dtype=torch.float), sampled.scored)
