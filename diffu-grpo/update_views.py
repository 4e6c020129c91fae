"""The views of each inner update on a rollout: drawn once, stored with their samples, scored when their turn comes.

A batch is a dictionary of tensors, as TRL makes it, with `view_noise` (rows, mu, views, prompt + canvas) and
`view_weights` (rows, mu, views, tokens): [:, k] is what inner update k is scored in.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Generator, Tensor

from d1.models.head import run_inside
from d1.scoring import ESTIMATORS, SampledRows, Scores, Views, score

Batch = dict[str, Any]


def draw_updates(sampled: SampledRows, generators: Sequence[Generator], settings: Any) -> Batch:
    """`view_noise` and `view_weights` of `settings.num_iterations` updates, by the run's estimator.

    Each update has views of its own, or all share the first ones where `settings.random_masking` is off.
    """
    draws = settings.num_iterations if settings.random_masking else 1
    drawn = [ESTIMATORS[settings.estimator](sampled, generators, settings) for _ in range(draws)]
    drawn *= settings.num_iterations // draws
    return {
        "view_noise": torch.stack([views.noise for views in drawn], dim=1),
        "view_weights": torch.stack([views.weights for views in drawn], dim=1),
    }


def views_of(batch: Batch, update: int) -> Views:
    """What an inner update is scored in."""
    return Views(batch["view_noise"][:, update], batch["view_weights"][:, update])


def updates_are_alike(batch: Batch) -> bool:
    """Whether every update has the views of the first. Waits for the device."""
    return all(bool((of == of[:, :1]).all()) for of in (batch["view_noise"], batch["view_weights"]))


def score_updates(
    model: Any, batch: Batch, score_one: Callable[[Any, Batch, Views], Scores], only_first: bool
) -> Tensor:
    """Log-probs (rows, mu, tokens) under the views of every update, without dropout.

    Args:
        only_first: the first update's stand for all.
    """
    updates = batch["view_noise"].shape[1]
    with evaluating(model):
        scored = [score_one(model, batch, views_of(batch, k)).logps for k in range(1 if only_first else updates)]
    return torch.stack(scored, dim=1).expand(-1, updates, -1)


def score_batch(
    model: Any,
    batch: Batch,
    views: Views,
    *,
    mask_token_id: int,
    gen_length: int,
    size: int | None = None,
    with_entropies: bool = False,
) -> Scores:
    """Log-probs (rows, tokens) in fp32, and entropies, `size` rows at a time (all by default).

    Args:
        model: as wrapped for training.
    """
    completion_ids = batch["completion_ids"]
    # TRL may pad completions past the canvas (pad_to_multiple_of); nothing is scored there, its mask is 0.
    width, rows = min(completion_ids.shape[1], gen_length), len(completion_ids)
    parts = []
    for start in range(0, rows, size or rows):
        some = slice(start, start + (size or rows))
        compute = partial(
            score,
            prompt_ids=batch["prompt_ids"][some],
            attention_mask=batch["prompt_mask"][some],
            completion_ids=completion_ids[some, :width],
            views=Views(views.noise[some], views.weights[some, :, :width]),
            mask_token_id=mask_token_id,
            gen_length=gen_length,
            with_entropies=with_entropies,
        )
        parts.append(run_inside(model, compute))
    beyond = (0, completion_ids.shape[1] - width)
    entropies = [part.entropies for part in parts if part.entropies is not None]
    return Scores(
        F.pad(torch.cat([part.logps for part in parts]), beyond),
        F.pad(torch.cat(entropies), beyond) if entropies else None,
    )


@contextlib.contextmanager
def evaluating(model: Any) -> Iterator[None]:
    """Dropout off inside, the former mode back after."""
    training = model.training
    model.eval()
    try:
        yield
    finally:
        model.train(training)
