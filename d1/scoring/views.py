"""Log-probabilities of a completion under a masked diffusion model: the estimators of diffu-GRPO.

The body (the model without its head) runs once over prompt and canvas. The head, whose logits are what fills memory,
runs over a few of the scored positions at a time, and for all but the last of them again in the backward pass.

Nothing of the prompt can be shared between masks: every position attends to all others, so from the second layer on the
states of even unmasked tokens depend on which others are hidden. Equal masks are the one exact case, scored once.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from d1.models.head import body_and_head

CHUNK_ELEMENTS = 2**24  # logits alive at once, positions x vocabulary: 67 MB in fp32


def token_logps(logits: Tensor, ids: Tensor) -> Tensor:
    """log softmax(logits)[ids]: (..., vocab) and (...) -> (...)."""
    return logits.gather(-1, ids.unsqueeze(-1)).squeeze(-1) - logits.logsumexp(-1)


def token_entropies(logits: Tensor) -> Tensor:
    """Entropy in nats of each position's distribution: (..., vocab) -> (...)."""
    logps = logits.log_softmax(-1)
    return -(logps.exp() * logps).sum(-1)


def mean_field_scores(
    model: Any,
    prompt_ids: Tensor,
    attention_mask: Tensor,
    completion_ids: Tensor,
    prompt_noise: Tensor,
    *,
    mask_token_id: int,
    gen_length: int,
    scored: Tensor | None = None,
    with_entropies: bool = False,
) -> tuple[Tensor, Tensor | None]:
    """`mean_field_logps` and, if asked for, the entropies of the same distributions (without gradients).

    Args:
        scored: (rows, completion) bool, the positions to score (default: all). The head runs nowhere else, and the
            results are 0 there: positions after a row's end of text cost nothing.
    """
    check_shapes(prompt_ids, completion_ids, prompt_noise, gen_length)
    body, head = body_and_head(model)
    rows, prompt_length = prompt_ids.shape
    # The canvas always has its full length, every position visible, so it says nothing of a completion's length.
    canvas = prompt_ids.new_full((rows, gen_length), mask_token_id)
    noised = torch.where(prompt_noise & attention_mask.bool(), mask_token_id, prompt_ids)
    visible = None  # a mask that hides nothing would keep compiled attention from its fast kernels
    if not attention_mask.all():
        visible = torch.cat([attention_mask, attention_mask.new_ones(rows, gen_length)], dim=1)
    states = body(torch.cat([noised, canvas], dim=1), visible)
    if scored is None:
        scored = torch.ones_like(completion_ids, dtype=torch.bool)
    states = states[:, prompt_length : prompt_length + scored.shape[1]][scored]
    # As many chunks as the shapes say, whatever is scored: where the head is sharded, every rank must call it as often.
    at_once = max(1, CHUNK_ELEMENTS // model.config.vocab_size)
    chunks = -(-rows * gen_length // at_once)

    def score(states: Tensor, ids: Tensor) -> tuple[Tensor, Tensor | None]:
        logits = head(states).float()
        logps = token_logps(logits, ids)
        # Last, so that the recomputation, which stops when it has what the gradient needs, leaves it out.
        with torch.no_grad():
            return logps, token_entropies(logits) if with_entropies else None

    def recomputed(states: Tensor, ids: Tensor) -> tuple[Tensor, Tensor | None]:
        return checkpoint(score, states, ids, use_reentrant=False)  # type: ignore[return-value]

    # The backward pass begins with the last chunk and frees it before it computes the others again: that one is full.
    def split(values: Tensor) -> list[Tensor]:
        cut = max(0, len(values) - at_once)
        return [*values[:cut].tensor_split(chunks - 1), values[cut:]] if chunks > 1 else [values]

    *others, last = zip(split(states), split(completion_ids[scored]), strict=True)
    done = [(recomputed if torch.is_grad_enabled() else score)(*part) for part in others] + [score(*last)]
    logps, entropies = zip(*done, strict=True)

    def placed(values: tuple[Tensor, ...]) -> Tensor:
        return torch.zeros(scored.shape, device=scored.device).masked_scatter(scored, torch.cat(values))

    return placed(logps), placed(entropies) if with_entropies else None


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
    return mean_field_scores(
        model,
        prompt_ids,
        attention_mask,
        completion_ids,
        prompt_noise,
        mask_token_id=mask_token_id,
        gen_length=gen_length,
    )[0]


def check_shapes(prompt_ids: Tensor, completion_ids: Tensor, prompt_noise: Tensor, gen_length: int) -> None:
    if prompt_noise.shape != prompt_ids.shape:
        raise ValueError(
            f"prompt_noise {tuple(prompt_noise.shape)} must have the prompt's shape {tuple(prompt_ids.shape)}"
        )
    if completion_ids.shape[1] > gen_length:
        raise ValueError(f"a completion of {completion_ids.shape[1]} tokens does not fit a canvas of {gen_length}")
