"""Score each token in the state in which the sampler revealed it.

The sum over tokens is then the log-probability of the sampler's own trajectory, without its choice of positions. The
rollout noted the same value, so ratios start at 1. A view is a *segment* of a row's steps: a single step (CJ-GRPO,
arXiv 2509.23924) or `segment_steps` merged steps (TraceRL, arXiv 2509.06949); all tokens of a merged segment are scored
in the state at its beginning. With `num_views`, only that many segments are chosen, as `draw_steps` says:

- `uniform` and `entropy` draw them, uniformly or in proportion to the entropy of what they reveal. The weight is the
  inverse of the probability: unbiased for the sum over all segments or, with `mean_step`, for their mean (AGRPO, arXiv
  2510.04019).
- `top` takes the segments whose tokens have the highest mean entropy, with weight 1. Biased by design (EGSPO).

The end of a completion counts as a token: a completion that is only an EOS has one segment.

Of a rollout with edits, a segment also scores the tokens that it wrote over others, and a view shows the drafts that
stood there: the sum is over all written tokens. If a merged segment wrote a position several times, the last write
counts.

For a block-causal model, steps are counted from the first step of each block: a view contains one step of every block.
"""

from __future__ import annotations

from dataclasses import replace
from typing import NamedTuple

import torch
from torch import Tensor

from d1.scoring.inputs import Randomness, SampledRows, ViewSettings, steps_in_blocks
from d1.scoring.views import Views

DRAW_STEPS = ("uniform", "entropy", "top")


def last_scored_segment(segments: Tensor, scored: Tensor) -> Tensor:
    """(rows, 1) the last step or segment, of `segments` (rows, canvas), that reveals a scored token; 0 if none does."""
    return torch.where(scored, segments, 0).amax(-1, keepdim=True)


class WrittenTokens(NamedTuple):
    """What a sampler wrote: (rows, canvas, writes) each, with one write per position where it does not edit.

    Attributes:
        steps: in a block-causal model from the first of each token's block; -1 where nothing was written.
        scored: bool.
        entropies: in nats.
        ids, logps: None where the completions have them, without edits.
    """

    steps: Tensor
    scored: Tensor
    entropies: Tensor
    ids: Tensor | None = None
    logps: Tensor | None = None

    @classmethod
    def from_rows(cls, sampled: SampledRows) -> WrittenTokens:
        scored = sampled.scored.unsqueeze(-1)
        if sampled.write_steps is None or sampled.write_entropies is None:
            steps = steps_in_blocks(sampled.reveal_steps, sampled.blocks)
            return cls(steps.unsqueeze(-1), scored, sampled.entropies.unsqueeze(-1))
        writes = sampled.write_steps.shape[-1]
        blocks = sampled.blocks
        if blocks is not None:
            blocks = blocks.repeat_interleave(writes, dim=1)
        steps = steps_in_blocks(sampled.write_steps.flatten(1), blocks).view_as(sampled.write_steps)
        return cls(
            steps=steps,
            scored=scored & (steps >= 0),
            entropies=sampled.write_entropies,
            ids=sampled.write_ids,
            logps=sampled.write_logps,
        )

    def with_segments(self, segments: Tensor) -> WrittenTokens:
        """With the numbers `segments` of what the steps are merged into."""
        return self._replace(steps=segments.masked_fill(self.steps < 0, -1))


def replay_views(hidden_prompt: Tensor, written: WrittenTokens, chosen: Tensor, weights: Tensor) -> Views:
    """A view for each of a row's `chosen` segments (rows, views), whose own tokens have `weights` (rows, views). Tokens
    written before the segment are visible, also after the completion's end: the sampler saw them, too.

    The `steps` of `written` are numbers of segments; `hidden_prompt` is (rows, views or 1, prompt).
    """
    # Shapes: R rows, V views, T tokens of the canvas, W writes. How many writes of each position were before the view's
    # segment, and how many of its scored ones are in it.
    steps_R1TW, chosen_RV11 = written.steps.unsqueeze(1), chosen[..., None, None]
    before_RVT = ((steps_R1TW < chosen_RV11) & (steps_R1TW >= 0)).sum(-1)
    now_RVT = ((steps_R1TW == chosen_RV11) & written.scored.unsqueeze(1)).sum(-1)
    hidden = torch.cat([hidden_prompt.expand(-1, chosen.shape[1], -1), before_RVT == 0], dim=-1)
    views = Views(noise=hidden, weights=torch.where(now_RVT > 0, weights.unsqueeze(-1), 0.0))
    if written.ids is None:
        return views

    # With edits, a view shows the last write before its segment, and scores the last one in it.
    def last_write(writes_RTW: Tensor, count_RVT: Tensor) -> Tensor:
        per_view = writes_RTW.unsqueeze(1).expand(-1, chosen.shape[1], -1, -1)
        return per_view.gather(-1, (count_RVT - 1).clamp(min=0).unsqueeze(-1)).squeeze(-1)

    logps = None
    if written.logps is not None:
        logps = last_write(written.logps, before_RVT + now_RVT)
    return replace(
        views,
        shown=last_write(written.ids, before_RVT),
        targets=last_write(written.ids, before_RVT + now_RVT),
        sampled_logps=logps,
    )


def segment_sums(segments: Tensor, scored: Tensor, values: Tensor) -> tuple[Tensor, Tensor]:
    """Sums of `values` (rows, canvas) over each segment's scored tokens, and counts of these: (rows, segments) fp64."""
    last = int(last_scored_segment(segments, scored).max())
    scored_segments = torch.where(scored, segments, 0)
    zeros = torch.zeros(len(scored), last + 1, dtype=torch.float64).to(values.device)
    sums = zeros.scatter_add(1, scored_segments, torch.where(scored, values, 0).double())
    counts = zeros.scatter_add(1, scored_segments, scored.double())
    return sums, counts


def segment_probabilities(segments: Tensor, scored: Tensor, entropies: Tensor, draw_steps: str) -> Tensor:
    """(rows, segments) probability to draw each segment, 0 for those after a row's last scored token; fp64.

    With "entropy", segments whose tokens were certain keep a small probability.
    """
    last = last_scored_segment(segments, scored)
    weights = torch.ones(len(last), int(last.max()) + 1, dtype=torch.float64, device=last.device)
    if draw_steps == "entropy":  # rounding can leave an entropy below 0
        weights = 1e-6 + segment_sums(segments, scored, entropies.clamp(min=0))[0]
    weights = weights.masked_fill(torch.arange(weights.shape[1], device=last.device) > last, 0)
    return weights / weights.sum(-1, keepdim=True)


def draw_with_replacement(chance: Tensor, numbers: Tensor) -> Tensor:
    """The segments (rows, draws) into which the uniform `numbers` fall, by their probabilities `chance`."""
    chosen = torch.searchsorted(chance.cumsum(-1), numbers.double().contiguous(), right=True)
    last = (chance > 0).long().cumsum(-1).argmax(-1, keepdim=True)  # rounding can leave the sum below a number
    return chosen.minimum(last)


def draw_segments(chance: Tensor, numbers: Tensor) -> tuple[Tensor, Tensor]:
    """`draw_with_replacement`, sorted, and the segments' weights 1 / (draws x chance). A segment that is drawn several
    times has the sum of its weights where it comes first and 0 at the others."""
    draws = numbers.shape[1]
    chosen = draw_with_replacement(chance, numbers).sort(-1).values
    repeated = torch.cat([torch.zeros_like(chosen[:, :1]).bool(), chosen[:, 1:] == chosen[:, :-1]], dim=1)
    times = (chosen.unsqueeze(1) == chosen.unsqueeze(2)).sum(-1)
    weights = times / (draws * chance.gather(1, chosen))  # of all its draws: one view scores the segment for them all
    return chosen, weights.masked_fill(repeated, 0.0).float()


def top_segments(scores: Tensor, count: int) -> tuple[Tensor, Tensor]:
    """The segments (rows, draws), at most `count`, with the highest `scores` (rows, segments), and their weights: 1, or
    0 for segments with score -inf, which pad rows that have fewer."""
    best = scores.sort(dim=-1, descending=True, stable=True)  # ties: the first one, on every device
    return best.indices[:, :count], best.values[:, :count].isfinite().float()


def draw(sampled: SampledRows, random: Randomness, settings: ViewSettings) -> Views:
    """Views of all segments or, with `num_views`, of those that `draw_steps` chooses."""
    written = WrittenTokens.from_rows(sampled)
    written = written.with_segments(written.steps // (settings.segment_steps or 1))
    chosen, weights = choose_segments(written, random, settings)
    return replay_views(clean_prompt(sampled), written, chosen, weights)


def choose_segments(written: WrittenTokens, random: Randomness, settings: ViewSettings) -> tuple[Tensor, Tensor]:
    """The segments (rows, views) that are scored, and their weights."""
    segments, scored, entropies = written.steps.flatten(1), written.scored.flatten(1), written.entropies.flatten(1)
    if not settings.num_views:
        return all_segments(int(last_scored_segment(segments, scored).max()), segments)
    if settings.draw_steps == "top":
        sums, counts = segment_sums(segments, scored, entropies)
        means = torch.where(counts > 0, sums / counts.clamp(min=1), -torch.inf)
        return top_segments(means, settings.num_views)
    numbers = random.evenly_spread(settings.num_views).to(segments.device)
    chance = segment_probabilities(segments, scored, entropies, settings.draw_steps)
    chosen, weights = draw_segments(chance, numbers)
    if settings.mean_step:
        weights = weights / (chance > 0).sum(-1, keepdim=True)
    return chosen, weights


def all_segments(last: int, like: Tensor) -> tuple[Tensor, Tensor]:
    """All segments up to number `last`, for as many rows as `like` has, with weights of 1; those that a row does not
    have score nothing."""
    chosen = torch.arange(last + 1, device=like.device).expand(len(like), -1)
    return chosen, torch.ones_like(chosen, dtype=torch.float)


def clean_prompt(sampled: SampledRows) -> Tensor:
    """(rows, 1, prompt) bool: no token of the prompt is hidden."""
    return torch.zeros_like(sampled.maskable).unsqueeze(1)
