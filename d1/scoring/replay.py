"""Scoring each token in the state that the sampler was in when it revealed the token.

The sum over tokens is then the log-probability of the sampler's own trajectory, its choice of places left out: what the
rollout recorded, so that ratios start at 1. A view is a *segment* of a row's steps: single steps (CJ-GRPO, arXiv
2509.23924), `segment_steps` of them merged (TraceRL, arXiv 2509.06949), or all of them cut into `segments` (d2, arXiv
2509.21474); of a merged segment all tokens are scored in the state at its beginning. With `num_views` only so many
segments are drawn, uniformly or in proportion to the entropy of what they reveal, and each weighs by the inverse of its
chance (AGRPO, arXiv 2510.04019; d2's one segment an update): unbiased for the sum over all segments.

The end of a completion counts as a token: a completion that is only an EOS has one segment.

For a block-causal model the steps are counted from the first of each block: a view holds one step of every block.
"""

from __future__ import annotations

import torch
from torch import Tensor

from d1.scoring.rollouts import Randomness, SampledRows, ViewSettings, within_blocks
from d1.scoring.views import Views

DRAW_STEPS = ("uniform", "entropy")


def views(settings: ViewSettings) -> int:
    if settings.num_views:
        return settings.num_views
    return settings.segments or -(-settings.steps // (settings.segment_steps or 1))


def segments_of(reveal_steps: Tensor, scored: Tensor, segments: int | None, segment_steps: int | None) -> Tensor:
    """(rows, canvas) the segment of each token's step; -1 for tokens that no step revealed.

    `segments` split only the steps up to the last scored token: later ones depend on the EOS stop. A row of fewer steps
    has one segment per step.
    """
    if segments:
        steps = last_scored(reveal_steps, scored) + 1
        merged = reveal_steps * steps.clamp(max=segments) // steps
    else:
        merged = reveal_steps // (segment_steps or 1)
    return merged.masked_fill(reveal_steps < 0, -1)


def last_scored(places: Tensor, scored: Tensor) -> Tensor:
    """(rows, 1) the last of the steps or segments (rows, canvas) that reveal a scored token; 0 if none does."""
    return torch.where(scored, places, 0).amax(-1, keepdim=True)


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
    """(rows, segments) probability to draw each segment, 0 for those after a row's last scored token; fp64.

    By entropy, segments whose tokens were certain keep a small chance.
    """
    last = last_scored(segments, scored)
    weights = torch.ones(len(last), int(last.max()) + 1, dtype=torch.float64, device=last.device)
    if draw_steps == "entropy":
        counted = torch.where(scored, entropies.clamp(min=0), 0).double()  # rounding can leave one below 0
        within = torch.where(scored, segments, 0)
        weights = torch.full_like(weights, 1e-6).scatter_add(1, within, counted)
    weights = weights.masked_fill(torch.arange(weights.shape[1], device=last.device) > last, 0)
    return weights / weights.sum(-1, keepdim=True)


def drawn(chance: Tensor, numbers: Tensor) -> tuple[Tensor, Tensor]:
    """The segments (rows, draws) at which uniform `numbers` fall, and their weights: 1 / (draws x chance); for a
    segment that is drawn several times the sum, at its first place."""
    draws = numbers.shape[1]
    chosen = torch.searchsorted(chance.cumsum(-1), numbers.double().contiguous(), right=True)
    last = (chance > 0).long().cumsum(-1).argmax(-1, keepdim=True)  # where rounding leaves the sum below a number
    chosen = chosen.minimum(last).sort(-1).values
    again = torch.cat([torch.zeros_like(chosen[:, :1]).bool(), chosen[:, 1:] == chosen[:, :-1]], dim=1)
    times = (chosen.unsqueeze(1) == chosen.unsqueeze(2)).sum(-1)
    weights = times / (draws * chance.gather(1, chosen))
    return chosen, weights.masked_fill(again, 0.0).float()


def draw(sampled: SampledRows, random: Randomness, settings: ViewSettings) -> Views:
    scored = sampled.scored
    steps = within_blocks(sampled.reveal_steps, sampled.blocks)
    segments = segments_of(steps, scored, settings.segments, settings.segment_steps)
    prompt = sampled.prompt_ids.shape[1]
    if not settings.num_views:
        return every_view(prompt, segments, scored)
    numbers = random.evenly_spread(settings.num_views).to(segments.device)
    chance = chances(segments, scored, sampled.entropies, settings.draw_steps)
    return replay_views(prompt, segments, *drawn(chance, numbers), scored)


def every_view(prompt: int, segments: Tensor, scored: Tensor) -> Views:
    """A view for each segment, as many as of the row with most: the others' last views score nothing."""
    count = int(last_scored(segments, scored).max()) + 1
    chosen = torch.arange(count, device=segments.device).expand(len(segments), -1)
    return replay_views(prompt, segments, chosen, torch.ones_like(chosen, dtype=torch.float), scored)


def draw_text(sampled: SampledRows, random: Randomness, settings: ViewSettings) -> Views:
    """The chain rule: each token given the prompt and the tokens before it, all later ones hidden (JustGRPO,
    2601.15165). One view per token, or per token of every block; exact for a sampler with `block_length` 1."""
    rows, canvas = sampled.scored.shape
    order = torch.arange(canvas, device=sampled.scored.device).repeat(rows, 1)
    return every_view(sampled.prompt_ids.shape[1], within_blocks(order, sampled.blocks), sampled.scored)
