"""Log-probabilities of a completion under a masked diffusion model: the estimators of diffu-GRPO."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor


def mean_field_logits(
    model: Any,
    prompt_ids: Tensor,
    attention_mask: Tensor,
    prompt_noise: Tensor,
    *,
    mask_token_id: int,
    gen_length: int,
    num_tokens: int,
) -> Tensor:
    """One forward pass over the noised prompt and an all-mask canvas -> fp32 logits (rows, num_tokens, vocab).

    The canvas always has its full `gen_length`, every position visible, so it says nothing of a completion's length.
    """
    rows, prompt_length = prompt_ids.shape
    canvas = prompt_ids.new_full((rows, gen_length), mask_token_id)
    noised = torch.where(prompt_noise & attention_mask.bool(), mask_token_id, prompt_ids)
    return model(
        input_ids=torch.cat([noised, canvas], dim=1),
        attention_mask=torch.cat([attention_mask, attention_mask.new_ones(rows, gen_length)], dim=1),
        logits_to_keep=torch.arange(prompt_length, prompt_length + num_tokens, device=prompt_ids.device),
    ).logits.float()


def token_logps(logits: Tensor, ids: Tensor) -> Tensor:
    """log softmax(logits)[ids]: (rows, positions, vocab) and (rows, positions) -> (rows, positions)."""
    return logits.gather(-1, ids.unsqueeze(-1)).squeeze(-1) - logits.logsumexp(-1)


def token_entropies(logits: Tensor) -> Tensor:
    """Entropy in nats of each position's distribution: (rows, positions, vocab) -> (rows, positions)."""
    logps = F.log_softmax(logits, dim=-1)
    return -(logps.exp() * logps).sum(-1)


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
    """One-step mean-field log-probabilities (d1, arXiv 2504.12216, section 3.1).

    Each token of the completion is scored as if it were revealed alone, in one step, from a canvas of masks behind a
    randomly masked prompt: l_k = log softmax f(q' + masks)[o_k].

    Args:
        prompt_ids, attention_mask: (rows, prompt), padded on the left.
        completion_ids: (rows, completion), completion <= gen_length.
        prompt_noise: (rows, prompt) bool, the prompt tokens to hide.
        gen_length: length of the canvas the completion was sampled on.

    Returns:
        (rows, completion) fp32; differentiable where gradients are on.

    Raises:
        ValueError: shapes that do not fit each other.
    """
    if prompt_noise.shape != prompt_ids.shape:
        raise ValueError(
            f"prompt_noise {tuple(prompt_noise.shape)} must have the prompt's shape {tuple(prompt_ids.shape)}"
        )
    if completion_ids.shape[1] > gen_length:
        raise ValueError(
            f"a completion of {completion_ids.shape[1]} tokens does not fit a canvas of {gen_length}"
        )
    logits = mean_field_logits(
        model,
        prompt_ids,
        attention_mask,
        prompt_noise,
        mask_token_id=mask_token_id,
        gen_length=gen_length,
        num_tokens=completion_ids.shape[1],
    )
    return token_logps(logits, completion_ids)
