"""The exact log-probability of a rollout with uniform noise (`d1/sampling/uniform.py`), without self-conditioning.

A pass from the state (text before the canvas, ids x) to ids x' has the probability

    prod over accepted positions of d(x' | x) x vocabulary^-(other positions),

with d at the pass's temperature, once discarded candidates are summed out. So the log-probability of a rollout is the
sum over passes of log d(x') at the accepted positions, and a constant. A last pass whose draw is the output ("draw")
counts all positions; one whose argmax is the output counts none.

A view is one pass of every canvas: it shows what the pass saw, and scores what it accepted. Which positions are
accepted, and when a canvas ends, depends on the weights, but has no gradient. Frozen as they were sampled, value and
gradient are exact for the weights that sampled. After an update, the accepted set of a state can differ: then a term
of the exact ratio would move between log d and -log(vocabulary). Such flips are counted
(`accepted_flips`).

With `num_views`, that many passes of each row are drawn, with the inverse of their probabilities as weights.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from d1.sampling.settings import SamplingSettings
from d1.sampling.uniform import accepted
from d1.scoring.inputs import Randomness, SampledRows, ViewSettings
from d1.scoring.replay import draw_segments
from d1.scoring.views import Scores, Views


def draw(sampled: SampledRows, random: Randomness, settings: ViewSettings) -> Views:
    """Views of all passes or, with `num_views`, of some; ValueError without a record of all writes."""
    if sampled.write_ids is None or sampled.write_steps is None:
        raise ValueError("accepted needs what each pass wrote: the rollout of a model with uniform noise")

    # What each position showed before and after each pass: write 0 is the first noise. (rows, passes + 1, canvas)
    ids = sampled.write_ids.transpose(1, 2)
    steps = sampled.write_steps.transpose(1, 2)[:, 1:]  # (rows, passes, canvas), as the next ones
    is_accepted = steps >= 0
    scored = is_accepted & sampled.scored.unsqueeze(1)
    rows, passes, canvas = steps.shape

    # The passes that are scored, and their weights, (rows, views).
    chosen, weights = torch.arange(passes).expand(rows, -1), torch.ones(rows, passes)
    if settings.num_views:
        counts = (scored.any(-1) * torch.arange(1, passes + 1)).amax(-1, keepdim=True).clamp(min=1)
        chance = (torch.arange(passes) < counts) / counts.double()
        chosen, weights = draw_segments(chance, random.evenly_spread(settings.num_views))
    at_chosen = chosen.unsqueeze(-1).expand(-1, -1, canvas)

    # Where the output is a draw, the last pass of a block has all positions, whatever their entropies: no rule chose.
    has_run = (steps != -1).unflatten(2, (canvas // settings.block_length, -1)).all(-1)  # (rows, passes, blocks)
    is_last = has_run & ~torch.cat([has_run[:, 1:], torch.zeros_like(has_run[:, :1])], dim=1)
    by_rule = is_accepted & ~is_last.repeat_interleave(settings.block_length, dim=2)

    sampled_logps = None
    if sampled.write_logps is not None:
        sampled_logps = sampled.write_logps.transpose(1, 2)[:, 1:].gather(1, at_chosen)
    temperatures = torch.tensor([settings.sampler.temperature_of(number) for number in range(passes)])
    return Views(
        noise=torch.zeros(rows, chosen.shape[1], sampled.prompt_ids.shape[1] + canvas, dtype=torch.bool),
        weights=torch.where(scored.gather(1, at_chosen), weights.unsqueeze(-1), 0.0),
        shown=ids[:, :-1].gather(1, at_chosen),
        targets=ids[:, 1:].gather(1, at_chosen),
        sampled_logps=sampled_logps,
        temperatures=temperatures[chosen],
        accepted=by_rule.gather(1, at_chosen),
    )


def accepted_flips(
    views: Views, scores: Scores, settings: SamplingSettings, gather: Callable[[Tensor], Tensor]
) -> dict[str, float]:
    """How the accepted sets change under the present weights: the shares of passes over a canvas, and of their
    positions, that differ. `scores` are those of the views, with entropies, and `settings` those of the sampler."""
    assert views.accepted is not None
    assert scores.canvas_entropies is not None
    size = settings.block_length
    before, now = (values.unflatten(-1, (-1, size)) for values in (views.accepted, scores.canvas_entropies))

    # A pass counts if a rule chose, and the view was scored.
    counted = before.any(-1) & views.weights.any(-1, keepdim=True)
    differ = (before != accepted(now, settings.level)) & counted.unsqueeze(-1)
    sums = torch.stack([differ.any(-1).sum(), differ.sum(), counted.sum()])
    passes, positions, total = gather(sums).view(-1, 3).sum(0).tolist()
    return {
        "accepted/flipped_passes": passes / max(total, 1),
        "accepted/flipped_positions": positions / max(total * size, 1),
    }
