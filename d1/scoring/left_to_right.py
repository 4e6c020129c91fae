"""The chain rule: each token given the prompt and the tokens before it, all later ones hidden (JustGRPO, 2601.15165).

Exact for a sampler that fills the canvas left to right, one token a step (`block_length` 1).
"""

from __future__ import annotations

import torch

from d1.scoring.replay import last_scored, replay_views
from d1.scoring.rollouts import Randomness, SampledRows, ViewSettings, within_blocks
from d1.scoring.views import Views


def views(settings: ViewSettings) -> int:
    return settings.gen_length


def draw(sampled: SampledRows, random: Randomness, settings: ViewSettings) -> Views:
    """One view a token, or a token of every block: the order of reveal is the order of the text."""
    rows, canvas = sampled.scored.shape
    places = within_blocks(torch.arange(canvas, device=sampled.scored.device).repeat(rows, 1), sampled.blocks)
    longest = int(last_scored(places, sampled.scored).max()) + 1
    chosen = torch.arange(longest, device=places.device).expand(rows, -1)
    weights = torch.ones_like(chosen, dtype=torch.float)
    return replay_views(sampled.prompt_ids.shape[1], places, chosen, weights, sampled.scored)
