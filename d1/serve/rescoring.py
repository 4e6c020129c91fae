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

STATES = 8  # in which a row is scored
EXACT = 1e-2  # largest difference in nats allowed in fp32, where rounding gives 1e-5 to 1e-3
CLOSE = 0.5  # largest median difference in nats allowed between data types, which usually gives about 0.02


def differences(one: Batch, scores: Scores, views: Views, exact: bool) -> str:
    """How the record of one row differs from the trainer's own `scores` of it in `views`; "" if it does not. `exact`:
    both programs compute in fp32 with the same weights, so that only rounding may differ."""
    scored = views.weights.ne(0).any(1)
    pairs = {"log-probabilities": (one["rollout_logps"], scores.logps)}
    if "rollout_entropies" in one and scores.entropies is not None:
        pairs["entropies"] = one["rollout_entropies"], scores.entropies
    for what, (told, own) in pairs.items():
        gaps = (own.float() - told)[scored].abs().cpu()
        at = int(gaps.argmax())
        if gaps.median() <= CLOSE and not (exact and gaps[at] > EXACT):
            continue
        position = int(scored[0].nonzero()[at])
        return (
            f"the {what} are not those of this run's model, which scored {len(gaps)} tokens again: the "
            f"difference is {gaps.median():.3g} nats in the median, and at token {position} they are "
            f"{told[0, position]:.4g} and {own[0, position]:.4g}"
        )
    return ""


def states_of(one: Batch, blocks: CanvasBlocks, number: int) -> Views:
    """Up to `STATES` views of one row, evenly spaced over its steps: the states in which it was sampled, and the tokens
    that were revealed there."""
    prompts, device = one["prompt_mask"], one["canvas_ids"].device
    sampled = sampled_rows(one | {"completion_mask": one["reveal_steps"] >= 0}, blocks)
    written = WrittenTokens.from_rows(sampled)
    steps = int(written.steps.max()) + 1
    count = min(STATES, steps)
    chosen = (torch.arange(count, device=device) * steps // count + number) % steps
    weights = torch.ones(1, count, device=device)
    return replay_views(torch.zeros_like(prompts, dtype=torch.bool).unsqueeze(1), written, chosen.unsqueeze(0), weights)


class Rescoring:
    """Scores rows of a trainer's rollouts again."""

    def __init__(self, trainer: DiffuGRPOTrainer) -> None:
        self.trainer, self.has_warned = trainer, False

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
        certain &= trainer.sampling.cache is None and not getattr(trainer.model, "is_loaded_in_4bit", False)
        number = trainer.rollout_number if trainer.mode == "train" else trainer.evaluation_rollouts
        row = rows[number % len(rows)]
        one = {name: batch[name][row : row + 1] for name in batch}
        views, of_training = states_of(one, trainer.blocks, number), trainer.computed_tokens
        with trainer.without_checkpointing(), evaluating(trainer.model):
            scores = trainer.scores(trainer.model, one, views, with_entropies=True, views_at_once=STATES)
        trainer.computed_tokens = of_training
        found = differences(one, scores, views, exact and certain)
        if found and certain:
            raise ValueError(f"{where(row)}{found}: other weights, settings or tokens sampled them")
        if found and not self.has_warned:
            self.has_warned = True
            logger.warning("%s%s. The sampler approximates, or its weights are older; said once.", where(row), found)
