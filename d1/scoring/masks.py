"""Estimators of few views with random masks of the completion, as coupled-GRPO and UniGRPO have them.

- `coupled`: the mean of d1's estimate and of that of two opposite masks (DiffuCoder, arXiv 2506.20639, section 4).
  Biased by design: a mask's share of hidden tokens is never below 0.2 nor above 0.8, and, as in the release, the
  expected weights sum to 1.5: 0.5 from the fully masked view and 0.5 from each of two complementary masks.
- `random_masks`: the mean log-probability of the tokens that a mask hides (MMaDA, arXiv 2505.15809). Over the inner
  updates on a rollout a row's share of hidden tokens starts at random and moves on in equal distances. Each is uniform
  on [0, 1), and so the mean over all draws is L / (L + 1) of the any-order bound (`d1/scoring/elbo.py`) of a completion
  of L tokens: hidden tokens weigh by one over the share that is in fact hidden, and a draw may hide none.
"""

from __future__ import annotations

import torch
from torch import Tensor

from d1.masking import draw_masks
from d1.scoring.rollouts import Randomness, SampledRows, ViewSettings, prompt_noise
from d1.scoring.views import Views, views_of_canvas

SHARES = (0.2, 0.8)  # a coupled mask's share of hidden tokens is uniform between these


def coupled_views(prompt_noise: Tensor, half: Tensor, share: Tensor, scored: Tensor) -> Views:
    """Three views: all tokens hidden, those of `half` (rows, canvas), and the others.

    Args:
        prompt_noise: (rows, 1, prompt) bool, hidden in all three.
        share: (rows,) the chance of each token to be in `half`.
    """
    hidden = torch.stack([torch.ones_like(half), half, ~half], dim=1)
    weights = torch.stack([torch.full_like(share, 0.5), 0.5 / share, 0.5 / (1 - share)], dim=1).unsqueeze(-1)
    return views_of_canvas(prompt_noise, hidden, scored, weights)


def draw_coupled(sampled: SampledRows, random: Randomness, settings: ViewSettings) -> Views:
    low, high = SHARES
    share = (low + (high - low) * random.uniform(1)[:, 0]).to(sampled.scored.device)
    half = draw_masks(sampled.scored, share, random.rows)
    noise = prompt_noise(sampled, random, settings.p_mask_prompt, 1)
    return coupled_views(noise, half, share, sampled.scored)


def random_mask_views(prompt_noise: Tensor, hidden: Tensor, scored: Tensor) -> Views:
    """One view, which hides `hidden` (rows, canvas) and `prompt_noise` (rows, 1, prompt); its weights sum to a
    completion's length."""
    count = (hidden & scored).sum(-1).clamp(min=1)
    weights = (scored.sum(-1) / count)[:, None, None]
    return views_of_canvas(prompt_noise, hidden.unsqueeze(1), scored, weights)


def draw_random(sampled: SampledRows, random: Randomness, settings: ViewSettings) -> Views:
    hidden = draw_masks(sampled.scored, random.spaced, random.rows)
    noise = prompt_noise(sampled, random, settings.p_mask_prompt, 1)
    return random_mask_views(noise, hidden, sampled.scored)
