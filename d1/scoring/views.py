"""Scoring a completion in chosen states: the one contract of all estimators of log-probabilities.

A *view* is a state to score in: which tokens of prompt and canvas are hidden there. Each view weighs each token of the
completion, and the log-probability of token k is the weighted sum over the views,

    sum over v of weights[v, k] x log p(token k | prompt and canvas with noise[v] hidden).

An estimator (`d1/scoring/estimators.py`) is a way to draw views. They are plain tensors: drawn once a rollout, they are
stored, shuffled, split and saved with their samples.

Nothing of the prompt can be shared between views: every position attends to all others, so from the second layer on the
states of even unmasked tokens depend on which others are hidden.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from d1.models.attention import padding_mask, require_prepared
from d1.models.head import body_and_head, target_logps


@dataclass(frozen=True)
class Views:
    """The states to score a batch of completions in.

    Attributes:
        noise: (rows, views, prompt + canvas) bool, the tokens that each view hides. Padding is never a token, and
            canvas behind the completion is masked in every view.
        weights: (rows, views, tokens) float; a token of weight 0 is not scored in that view and costs nothing.
    """

    noise: Tensor
    weights: Tensor


class Scores(NamedTuple):
    """What `score` gives.

    Attributes:
        logps: (rows, tokens) fp32, the weighted sum of log-probabilities; 0 where every weight is 0. Differentiable.
        entropies: (rows, tokens), the same sum of the entropies in nats of the same distributions, without gradients;
            None unless asked for.
        view_logps: (rows, views, tokens), each view's log-probabilities before weighing, 0 where not scored; None
            unless asked for. Differentiable.
    """

    logps: Tensor
    entropies: Tensor | None = None
    view_logps: Tensor | None = None


def score(
    model: Any,
    prompt_ids: Tensor,
    attention_mask: Tensor,
    completion_ids: Tensor,
    views: Views,
    *,
    mask_token_id: int,
    gen_length: int,
    with_entropies: bool = False,
    with_view_logps: bool = False,
) -> Scores:
    """Log-probabilities of completions, summed over views with their weights.

    One forward pass a view. With gradients and several views, each view's pass is computed again when the backward pass
    comes to it, so that memory does not grow with their number.

    Args:
        model: from `d1.models.load_model`.
        prompt_ids, attention_mask: (rows, prompt), padded on the left.
        completion_ids: (rows, tokens), tokens <= gen_length.
        gen_length: length of the canvas the completion was sampled on. All of it is visible to attention: a shorter one
            would tell the model where the completion ends.

    Raises:
        ValueError: the model was not prepared, or shapes do not fit each other.
    """
    require_prepared(model)
    check_shapes(prompt_ids, completion_ids, views, gen_length)
    rows, width = completion_ids.shape
    behind = prompt_ids.new_full((rows, gen_length - width), mask_token_id)
    clean = torch.cat([prompt_ids, completion_ids, behind], dim=1)
    visible = torch.cat([attention_mask, attention_mask.new_ones(rows, gen_length)], dim=1)
    noise = views.noise & visible.bool().unsqueeze(1)
    shown = padding_mask(visible)  # a mask that hides nothing would keep compiled attention from its fast kernels

    def view(hidden: Tensor, scored: Tensor) -> tuple[Tensor, Tensor | None]:
        states = body_and_head(model)[0](clean.masked_fill(hidden, mask_token_id), shown)
        states = states[:, prompt_ids.shape[1] :][:, :width][scored]
        values = target_logps(model, states, completion_ids[scored], with_entropies=with_entropies)
        return placed(values[0], scored), None if values[1] is None else placed(values[1], scored)

    recompute = torch.is_grad_enabled() and views.noise.shape[1] > 1
    compute: Callable[..., Any] = partial(checkpoint, view, use_reentrant=False) if recompute else view
    each = [compute(*of) for of in zip(noise.unbind(1), views.weights.ne(0).unbind(1), strict=True)]
    logps = torch.stack([logps for logps, _ in each], dim=1)
    entropies = torch.stack([entropy for _, entropy in each], dim=1) if with_entropies else None
    return Scores(
        (views.weights * logps).sum(1),
        None if entropies is None else (views.weights * entropies).sum(1),
        logps if with_view_logps else None,
    )


def placed(values: Tensor, where: Tensor) -> Tensor:
    """`values` (n,) at the n true places of `where`, 0 elsewhere."""
    return values.new_zeros(where.shape).masked_scatter(where, values)


def check_shapes(prompt_ids: Tensor, completion_ids: Tensor, views: Views, gen_length: int) -> None:
    rows, prompt = prompt_ids.shape
    if completion_ids.shape[1] > gen_length:
        raise ValueError(f"a completion of {completion_ids.shape[1]} tokens does not fit a canvas of {gen_length}")
    expected = {"noise": (rows, prompt + gen_length), "weights": tuple(completion_ids.shape)}
    for name, (first, last) in expected.items():
        found = tuple(getattr(views, name).shape)
        if len(found) != 3 or (found[0], found[2]) != (first, last):
            raise ValueError(f"views.{name} must be ({first}, views, {last}), got {found}")
    if views.noise.shape[1] != views.weights.shape[1]:
        raise ValueError(f"{views.noise.shape[1]} views have noise and {views.weights.shape[1]} have weights")
