"""End a run when it has processed a given number of tokens, to compare methods at equal compute.

The budget counts what `compute_tokens` logs: 1 per token of a forward pass and 2 for its backward pass
(`d1.scoring.views.Scores.compute`), in rollouts, scoring and updates, over all processes; evaluations do not count.
The count survives a resume. The learning rate is constant or linear; a linear one falls to 0 with the budget.
"""

from __future__ import annotations

import math
import os
import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from transformers import TrainerCallback

from d1.rl.state import read_counters


def total_compute(trainer: Any) -> int:
    """Tokens processed so far, over all processes."""
    own = torch.as_tensor(trainer.compute, device=trainer.accelerator.device)
    return int(trainer.accelerator.gather(own).sum())


def is_spent(checkpoint: str | None, budget: int | None) -> bool:
    """Whether the run had reached its budget when it wrote `checkpoint`."""
    if checkpoint is None or budget is None:
        return False
    ranks = range(len([*Path(checkpoint).glob("rollout_rank*.json")]))
    return sum(read_counters(Path(checkpoint), rank).get("compute", 0) for rank in ranks) >= budget


def saved_at(output_dir: str | Path, share: float) -> Path:
    """The folder of the model saved at a share of the budget."""
    return Path(output_dir) / f"at_{share:g}"


class StopAtCompute(TrainerCallback):
    """Saves the model at the first step that reaches each of the `shares` of the budget (`saved_at`), and ends the run
    with a checkpoint at the first step that reaches all of it. A linear learning rate falls with the budget: a step's
    rate depends on what was spent before it. Runs after `LoadExtra`, which restores what was spent."""

    def __init__(self, trainer: Any, budget: int, shares: Sequence[float] = ()) -> None:
        self.trainer, self.budget, self.shares = trainer, budget, shares
        self.spent = 0

    def on_train_begin(self, args: Any, state: Any, control: Any, lr_scheduler: Any = None, **kwargs: Any) -> None:
        self.spent = total_compute(self.trainer)
        if args.lr_scheduler_type.value == "linear":
            scheduler = getattr(lr_scheduler, "scheduler", lr_scheduler)  # Accelerate wraps it
            scheduler.lr_lambdas = [lambda step: self.unspent()] * len(scheduler.lr_lambdas)

    def unspent(self) -> float:
        """The share of the budget that is left; times the peak, it is the learning rate of the next step."""
        return max(0.0, 1 - total_compute(self.trainer) / self.budget)

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        before, self.spent = self.spent, total_compute(self.trainer)
        for share in self.shares:
            if before < share * self.budget <= self.spent:  # equal on all processes; what is on a disk may not be
                save_aside(self.trainer, saved_at(args.output_dir, share))
        if self.spent >= self.budget:
            control.should_log = control.should_save = control.should_training_stop = True

    def last_step(self, state: Any) -> int:
        """The step that will spend the rest of the budget, if steps cost what they have cost so far."""
        if not self.spent:
            return int(state.max_steps)
        return min(math.ceil(state.global_step * self.budget / self.spent), int(state.max_steps))


def save_aside(trainer: Any, folder: Path) -> None:
    """Writes the model to `folder`, completely or not at all."""
    partial = folder.with_name(f".{folder.name}")
    trainer.save_model(str(partial))
    trainer.accelerator.wait_for_everyone()
    if trainer.args.should_save:
        shutil.rmtree(folder, ignore_errors=True)
        os.replace(partial, folder)
    trainer.accelerator.wait_for_everyone()
