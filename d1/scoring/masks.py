"""Estimators with few views and random masks: those of d1, coupled-GRPO and UniGRPO.

- `one_step`: every token as if it were revealed alone, in one step (d1, arXiv 2504.12216, section 3.1): the whole
  canvas is masked, and tokens of the prompt are hidden at random.
- `coupled`: the mean of d1's estimate and of the estimate from two complementary masks (DiffuCoder, arXiv 2506.20639,
  section 4). Biased by design: the masking probability is between 0.2 and 0.8, and, as in the released code, the
  expected weights sum to 1.5: 0.5 from the fully masked view and 0.5 from each of two complementary masks.
- `random_masks`: `num_views` masks, each of which hides tokens with a probability uniform on [0.1, 0.9]; the mean
  log-probability of the tokens that a mask hides, times the completion's length (UniGRPO of MMaDA, arXiv 2505.15809, as
  released). Biased for the any-order bound (`d1/scoring/elbo.py`), which needs probabilities from 0 to 1.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from d1.masking import draw_masks
from d1.scoring.rollouts import Randomness, SampledRows, ViewSettings, prompt_noise
from d1.scoring.views import Views, score, views_of_canvas

SHARES = (0.2, 0.8)  # the masking probability of `coupled` is uniform between these
TIMES = (0.1, 0.9)  # and that of `random_masks` between these


def one_step_views(prompt_noise: Tensor, scored: Tensor, gen_length: int) -> Views:
    """One view, which hides the whole canvas and `prompt_noise` (rows, prompt); `scored` (rows, tokens) weigh 1."""
    canvas = prompt_noise.new_ones(len(prompt_noise), gen_length)
    return Views(torch.cat([prompt_noise, canvas], dim=1).unsqueeze(1), scored.float().unsqueeze(1))


def draw_one_step(sampled: SampledRows, random: Randomness, settings: ViewSettings) -> Views:
    """Each maskable token of the prompt is hidden with probability `settings.p_mask_prompt`."""
    noise = draw_masks(sampled.maskable, settings.p_mask_prompt, random.rows)
    return one_step_views(noise, sampled.scored, sampled.gen_length)


def mean_field_logps(
    model: Any,
    prompt_ids: Tensor,
    attention_mask: Tensor,
    completion_ids: Tensor,
    prompt_noise: Tensor,
    *,
    mask_token_id: int,
    gen_length: int,
) -> Tensor:
    """One-step mean-field log-probabilities l_k = log softmax f(q' + masks)[o_k], where q' is the masked prompt.

    Args:
        prompt_ids, attention_mask: (rows, prompt), padded on the left.
        completion_ids: (rows, completion), completion <= gen_length.
        prompt_noise: (rows, prompt) bool, the prompt tokens to hide.
        gen_length: length of the canvas the completion was sampled on.

    Returns:
        (rows, completion) fp32; differentiable if gradients are enabled.

    Raises:
        ValueError: the model was not prepared, or shapes do not match.
    """
    if prompt_noise.shape != prompt_ids.shape:
        raise ValueError(f"prompt_noise {tuple(prompt_noise.shape)} needs the prompt's shape {tuple(prompt_ids.shape)}")
    views = one_step_views(prompt_noise, torch.ones_like(completion_ids, dtype=torch.bool), gen_length)
    given = (prompt_ids, attention_mask, completion_ids, views)
    return score(model, *given, mask_token_id=mask_token_id, gen_length=gen_length).logps


def coupled_views(prompt_noise: Tensor, half: Tensor, share: Tensor, scored: Tensor) -> Views:
    """Three views: the first hides all tokens, the second those of `half` (rows, canvas), the third the others. A token
    is in `half` with probability `share` (rows,); `prompt_noise` (rows, 1, prompt) is hidden in all three."""
    # A mask's weight is 0.5 / P(it hides the token), so its expected value is 0.5, as that of the first view.
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
    """Views that hide `hidden` (rows, views, canvas) and `prompt_noise` (rows, views or 1, prompt); the weights of each
    view sum to the completion's length divided by the number of views."""
    count = (hidden & scored.unsqueeze(1)).sum(-1, keepdim=True).clamp(min=1)
    weights = scored.sum(-1)[:, None, None] / (hidden.shape[1] * count)
    return views_of_canvas(prompt_noise, hidden, scored, weights)


def draw_random(sampled: SampledRows, random: Randomness, settings: ViewSettings) -> Views:
    low, high = TIMES
    times = low + (high - low) * random.uniform(settings.draws)
    hidden = torch.stack([draw_masks(sampled.scored, of_view, random.rows) for of_view in times.unbind(1)], dim=1)
    noise = prompt_noise(sampled, random, settings.p_mask_prompt, settings.draws)
    return random_mask_views(noise, hidden, sampled.scored)
