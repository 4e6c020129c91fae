"""A trial of the rows that a run has chosen, on three rows of random numbers, before any model is loaded.

A mistake in a user's function then is one line at the start, not a traceback after the first rollout. What three rows
cannot show is checked again whenever a row is called (`rows.py`, `d1/scoring/estimators.py`).
"""

from __future__ import annotations

import traceback
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from d1.masking import keyed_generator
from d1.rl.advantages import ADVANTAGES
from d1.rl.objectives import OBJECTIVES, PENALTIES
from d1.rl.rows import LossInputs
from d1.scoring import ESTIMATORS, SampledRows, Views, ViewSettings
from d1.scoring.estimators import called
from d1.scoring.rollouts import randomness

PROMPT, CANVAS = 3, 8
LENGTHS = torch.tensor([8, 3, 0])  # the last row takes no part in the loss
SCORED = torch.arange(CANVAS) < LENGTHS.unsqueeze(1)


@contextmanager
def explained(row: str, function: object) -> Iterator[None]:
    """Turns what a row's function raises, or its row about what it returned, into one line."""
    try:
        yield
    except Exception as error:
        message, name = str(error).partition("\n")[0], called(function)
        if not isinstance(error, ValueError):
            lines = [one.lineno for one in traceback.extract_tb(error.__traceback__) if one.filename in name]
            message = f"{type(error).__name__} in line {lines[-1] if lines else '?'}: {message}"
        raise ValueError(f"{row}: {message if name in message else f'{name}: {message}'}") from error


def try_rows(settings: Any) -> None:
    """Calls the estimator, the objective, the penalty and the advantage of a `DiffuGRPOConfig` once.

    Raises:
        ValueError: says which of them returned what, and what is expected.
    """
    estimator, objective = ESTIMATORS[settings.estimator], OBJECTIVES[settings.objective]
    penalty, advantage = PENALTIES[settings.kl], ADVANTAGES[settings.advantage]
    with torch.random.fork_rng(devices=[]), torch.enable_grad():
        with explained(f"ESTIMATORS[{settings.estimator!r}]", estimator.draw):
            small = replace(settings.view_settings(), gen_length=CANVAS, steps=CANVAS, block_length=CANVAS // 2)
            views, most = draw_views(estimator, small), estimator.views(small)
            if views.noise.shape[1] > most:
                raise ValueError(
                    f"gave {views.noise.shape[1]} views, and its row says at most {most}: "
                    "write Estimator(..., views=lambda settings: ...)"
                )
        if objective.loss is not None:
            with explained(f"OBJECTIVES[{settings.objective!r}]", objective.loss):
                inputs = random_inputs(views, objective.reads_old, settings.needs_reference)
                ratios = torch.zeros(2 * len(LENGTHS)) if objective.over_all_rows else None
                objective(replace(inputs, log_ratios=ratios), settings)[0].backward()
        if settings.beta and not settings.has_trls_kl:
            with explained(f"PENALTIES[{settings.kl!r}]", penalty.value):
                inputs = random_inputs(views, penalty.to == "old", penalty.to == "reference")
                penalty(inputs, settings).backward()
        if advantage.of is not None:
            with explained(f"ADVANTAGES[{settings.advantage!r}]", advantage.of):
                advantage(torch.linspace(-1, 1, 3 * settings.num_generations).view(3, -1))


def draw_views(estimator: Any, settings: ViewSettings) -> Views:
    """An estimator's views of rows that a sampler filled left to right."""
    rows, places = len(LENGTHS), torch.arange(CANVAS).repeat(len(LENGTHS), 1)
    visible = torch.arange(PROMPT) >= torch.tensor([1, 0, 0]).unsqueeze(1)  # the first prompt is padded
    sampled = SampledRows(
        prompt_ids=torch.ones(rows, PROMPT, dtype=torch.long),
        attention_mask=visible.long(),
        maskable=visible,
        completion_ids=places,
        scored=SCORED,
        reveal_steps=places,
        logps=-torch.ones(rows, CANVAS),
        entropies=torch.ones(rows, CANVAS),
    )
    [random] = randomness([keyed_generator(0, row) for row in range(rows)], keyed_generator(0), 0, rows, 1)
    return estimator(sampled, random, settings)


def random_inputs(views: Views, old: bool, reference: bool) -> LossInputs:
    """What a loss may be given of rows under these views, with or without old and reference log-probabilities."""
    random = keyed_generator(1)

    def logps() -> Tensor:
        return -torch.rand(views.weights.shape, generator=random) * (views.weights != 0)

    return LossInputs(
        view_logps=logps().requires_grad_() * 1.0,  # of a model's output, no leaf
        view_old=logps() if old else None,
        view_reference=logps() if reference else None,
        weights=views.weights,
        advantages=torch.tensor([1.0, -1.0, 0.5]),
        mask=SCORED.long(),
        tokens=LENGTHS.sum(),
    )
