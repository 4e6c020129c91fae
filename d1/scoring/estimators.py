"""The estimators of log-probabilities, by name. A new one is a file beside this and a line here."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from d1.scoring import coupled, elbo, left_to_right, one_step, random_masks, replay, spg
from d1.scoring.rollouts import Randomness, SampledRows, draws_of
from d1.scoring.views import Views

# What a rollout's rows are scored in, for one update on them. The settings are those of the run, `DiffuGRPOConfig`.
Draw = Callable[[SampledRows, Randomness, Any], Views]


@dataclass(frozen=True)
class Estimator:
    """A row of the table.

    Attributes:
        draw: gives the views.
        views: settings -> the most views a row can get, for the plan of a run and the estimate of its memory.
        draws: settings -> whether each inner update gets views of its own, drawn anew; else old and reference log-probs
            are those of the first, scored once.
        replays: scores tokens in the states that the sampler itself went through, so these must be exact.
        linear: the weighted sum over views estimates a log-probability; False for a bound that is no such sum.
    """

    draw: Draw
    views: Callable[[Any], int] = lambda settings: 1
    draws: Callable[[Any], bool] = lambda settings: True
    replays: bool = False
    linear: bool = True


ESTIMATORS: dict[str, Estimator] = {
    "one_step": Estimator(one_step.draw, draws=lambda settings: settings.p_mask_prompt > 0),
    "coupled": Estimator(coupled.draw, lambda settings: 3),
    "elbo": Estimator(elbo.draw, elbo.views),
    "espo": Estimator(elbo.draw_counts, elbo.views),
    "random_masks": Estimator(random_masks.draw),
    "spg": Estimator(spg.draw, draws_of, linear=False),
    "replay": Estimator(replay.draw, replay.views, lambda settings: settings.num_views is not None, replays=True),
    "left_to_right": Estimator(left_to_right.draw, left_to_right.views, lambda settings: False),
}
