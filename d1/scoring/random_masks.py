"""UniGRPO's estimator: the mean log-probability of the tokens that a random mask hides (MMaDA, arXiv 2505.15809).

Over the inner updates on a rollout a row's share of hidden tokens begins at random and goes on in equal distances.
Each is uniform on [0, 1), and so the mean over all draws is L / (L + 1) of the any-order bound (`d1/scoring/elbo.py`)
of a completion of L tokens: hidden tokens weigh by one over the share that is in fact hidden, and a draw may hide none.
"""

from __future__ import annotations

from torch import Tensor

from d1.masking import draw_masks
from d1.scoring.rollouts import Randomness, SampledRows, ViewSettings, prompt_noise
from d1.scoring.views import Views, views_of_canvas


def random_mask_views(prompt_noise: Tensor, hidden: Tensor, scored: Tensor) -> Views:
    """One view, which hides `hidden` (rows, canvas); its tokens' weights sum to the completion's length.

    Args:
        prompt_noise: (rows, 1, prompt) bool.
    """
    count = (hidden & scored).sum(-1).clamp(min=1)
    weights = (scored.sum(-1) / count)[:, None, None]
    return views_of_canvas(prompt_noise, hidden.unsqueeze(1), scored, weights)


def draw(sampled: SampledRows, random: Randomness, settings: ViewSettings) -> Views:
    hidden = draw_masks(sampled.scored, random.spaced, random.rows)
    noise = prompt_noise(sampled, random, settings.p_mask_prompt, 1)
    return random_mask_views(noise, hidden, sampled.scored)
