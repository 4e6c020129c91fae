"""Whether the log-probabilities of rollouts that another program sampled are those of the trainer's own model."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

import torch

from d1.rl.batch import Batch, evaluating, sampled_rows
from d1.scoring import Scores, Views
from d1.scoring.inputs import CanvasBlocks
from d1.scoring.replay import WrittenTokens, replay_views

if TYPE_CHECKING:
    from d1.rl.trainer import DiffuGRPOTrainer

logger = logging.getLogger(__name__)

MAX_STATES = 8  # in which a row is scored
MAX_DIFFERENCE_FP32 = 1e-2  # largest difference in nats allowed in fp32, where rounding gives 1e-5 to 1e-3
MAX_MEDIAN_DIFFERENCE = 0.5  # in nats, allowed between data types, where the median is usually about 0.02


def describe_difference(row: Batch, scores: Scores, views: Views, exact: bool) -> str:
    """How the record of one row differs from the trainer's own `scores` of it in `views`; "" if it does not. `exact`:
    both programs compute in fp32 with the same weights, so that only rounding may differ."""
    is_scored = views.weights.ne(0).any(1)
    values = {"log-probabilities": (row["rollout_logps"], scores.logps)}
    if "rollout_entropies" in row and scores.entropies is not None:
        values["entropies"] = (row["rollout_entropies"], scores.entropies)
    for name, (sampler_values, own_values) in values.items():
        gaps = (own_values.float() - sampler_values)[is_scored].abs().cpu()
        largest = int(gaps.argmax())
        if gaps.median() <= MAX_MEDIAN_DIFFERENCE and not (exact and gaps[largest] > MAX_DIFFERENCE_FP32):
            continue
        position = int(is_scored[0].nonzero()[largest])
        return (
            f"the {name} are not those of this run's model, which scored {len(gaps)} tokens again: the "
            f"difference is {gaps.median():.3g} nats in the median, and at token {position} they are "
            f"{sampler_values[0, position]:.4g} and {own_values[0, position]:.4g}"
        )
    return ""


def states_of(row: Batch, blocks: CanvasBlocks, number: int) -> Views:
    """Up to `MAX_STATES` views of one row, evenly spaced over its steps: the states in which it was sampled, and the
    tokens that were revealed there."""
    device = row["canvas_ids"].device
    sampled = sampled_rows(row | {"completion_mask": row["reveal_steps"] >= 0}, blocks)
    written = WrittenTokens.from_rows(sampled)
    step_count = int(written.steps.max()) + 1
    count = min(MAX_STATES, step_count)
    steps = (torch.arange(count, device=device) * step_count // count + number) % step_count
    prompt_noise = torch.zeros_like(row["prompt_mask"], dtype=torch.bool).unsqueeze(1)
    weights = torch.ones(1, count, device=device)
    return replay_views(prompt_noise, written, steps.unsqueeze(0), weights)


class Rescoring:
    """Scores rows of a trainer's rollouts again."""

    def __init__(self, trainer: DiffuGRPOTrainer) -> None:
        self.trainer = trainer
        self.has_warned = False

    def check(self, batch: Batch, rows: Sequence[int], where: Callable[[int], str], exact: bool, certain: bool) -> None:
        """Scores again one of the `rows` of a rollout that another program sampled: in one forward pass, in some of the
        states in which the row was sampled. Row and states change from rollout to rollout. Model, batch and generators
        do not change, and the cost is not part of `compute_tokens`. Log-probabilities or entropies that are not those
        of the model in these states are a ValueError.

        Args:
            batch: `prompt_ids` and `prompt_mask` (rows, prompt), and the record of the rollout.
            where: from the number of a row, who sampled it.
            exact: both programs compute in fp32.
            certain: the weights are those that sampled. If they are not, or if the sampler approximates (a cache, or
                4-bit weights in the trainer), a difference is only a warning.
        """
        trainer = self.trainer
        if not rows or trainer.sampling.cfg_scale:  # guidance samples from other log-probabilities
            return
        if trainer.sampling.cache is not None or getattr(trainer.model, "is_loaded_in_4bit", False):
            certain = False
        number = trainer.rollout_number if trainer.mode == "train" else trainer.evaluation_rollouts
        index = rows[number % len(rows)]
        row = {name: batch[name][index : index + 1] for name in batch}
        views = states_of(row, trainer.blocks, number)
        computed_tokens = trainer.computed_tokens
        with trainer.without_checkpointing(), evaluating(trainer.model):
            scores = trainer.scores(trainer.model, row, views, with_entropies=True, views_at_once=MAX_STATES)
        trainer.computed_tokens = computed_tokens
        difference = describe_difference(row, scores, views, exact and certain)
        if difference and certain:
            raise ValueError(f"{where(index)}{difference}: other weights, settings or tokens sampled them")
        if difference and not self.has_warned:
            self.has_warned = True
            logger.warning(
                "%s%s. The sampler approximates, or its weights are older; said once.", where(index), difference
            )
