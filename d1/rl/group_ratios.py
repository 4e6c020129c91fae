"""The log-ratios of all completions of a prompt, for objectives that weigh a completion against the others."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from d1.rl.bridge import rollout_buffer
from d1.rl.objectives import sequence_log_ratios
from d1.rl.updates import Batch, evaluating, loss_inputs, views_of


def compare_groups(trainer: Any, model: Any) -> None:
    """Adds `log_ratios`, those of all rows of each row's prompt, to a rollout's micro-batches at the start of an
    update. The rows were shuffled, and a group may be spread over several processes."""
    update, batches = trainer.update, rollout_buffer(trainer)

    def ratios(batch: Batch) -> Tensor:
        if update == 0 and not trainer.args.old_as_sampled:  # the policy is still the one of the old log-probs
            return torch.zeros_like(batch["advantages"])
        scores = trainer.scores(model, batch, views_of(batch, update))
        return sequence_log_ratios(loss_inputs(batch, scores, update))

    gather = trainer.accelerator.gather
    with trainer.without_checkpointing(), evaluating(model):
        everyone = gather(torch.cat([ratios(batch) for batch in batches]))
    order = gather(torch.cat([batch["group"] for batch in batches])).argsort()
    groups = everyone[order].view(-1, trainer.num_generations)
    for batch in batches:
        batch["log_ratios"] = groups[batch["group"]]
