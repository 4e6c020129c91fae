"""d1's estimator, `one_step`: every token as if it were revealed alone, in one step (arXiv 2504.12216, section 3.1).
The whole canvas is masked, and tokens of the prompt are hidden at random.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from d1.masking import draw_masks
from d1.scoring.inputs import Randomness, SampledRows, ViewSettings
from d1.scoring.views import Views, score


def one_step_views(hidden_prompt: Tensor, scored: Tensor, gen_length: int) -> Views:
    """One view, which hides the whole canvas and `hidden_prompt` (rows, prompt); `scored` (rows, tokens) weigh 1."""
    canvas = hidden_prompt.new_ones(len(hidden_prompt), gen_length)
    hidden = torch.cat([hidden_prompt, canvas], dim=1)
    return Views(noise=hidden.unsqueeze(1), weights=scored.float().unsqueeze(1))


def draw_one_step(sampled: SampledRows, random: Randomness, settings: ViewSettings) -> Views:
    """Each maskable token of the prompt is hidden with probability `settings.p_mask_prompt`."""
    hidden_prompt = draw_masks(sampled.maskable, settings.p_mask_prompt, random.generators)
    return one_step_views(hidden_prompt, sampled.scored, sampled.gen_length)


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
    scores = score(
        model, prompt_ids, attention_mask, completion_ids, views, mask_token_id=mask_token_id, gen_length=gen_length
    )
    return scores.logps
