"""coupled-GRPO's estimator: the mean of d1's and of two opposite masks (DiffuCoder, arXiv 2506.20639, section 4).

Biased by design: a mask's share of hidden tokens is never below 0.2 nor above 0.8, and the weights are those of one
and a half log-probabilities, as in the release: half a one-step one, and half of each mask's, which are each a whole.
"""

from __future__ import annotations

import torch
from torch import Tensor

from d1.masking import draw_masks
from d1.scoring.rollouts import Randomness, SampledRows, ViewSettings, prompt_noise
from d1.scoring.views import Views, views_of_canvas

SHARES = (0.2, 0.8)  # a mask's share of hidden tokens is uniform between these


def coupled_views(prompt_noise: Tensor, half: Tensor, share: Tensor, scored: Tensor) -> Views:
    """Three views: all tokens hidden, those of `half` (rows, canvas), and the others.

    Args:
        prompt_noise: (rows, 1, prompt) bool, hidden in all three.
        share: (rows,) the chance of each token to be in `half`.
    """
    hidden = torch.stack([torch.ones_like(half), half, ~half], dim=1)
    weights = torch.stack([torch.full_like(share, 0.5), 0.5 / share, 0.5 / (1 - share)], dim=1).unsqueeze(-1)
    return views_of_canvas(prompt_noise, hidden, scored, weights)


def draw(sampled: SampledRows, random: Randomness, settings: ViewSettings) -> Views:
    low, high = SHARES
    share = (low + (high - low) * random.uniform(1)[:, 0]).to(sampled.scored.device)
    half = draw_masks(sampled.scored, share, random.rows)
    noise = prompt_noise(sampled, random, settings.p_mask_prompt, 1)
    return coupled_views(noise, half, share, sampled.scored)
