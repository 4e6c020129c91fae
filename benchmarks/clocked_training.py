"""The clock of a training run: from its first step to its last, the optimizer apart."""

from __future__ import annotations

from typing import Any

from transformers import TrainerCallback

from benchmarks.clock import Clock


class ClockedTraining(TrainerCallback):
    """Clocks a training run between its first and last step, without its setup; the optimizer's steps are a phase."""

    def __init__(self, clock: Clock) -> None:
        self.clock = clock
        self.hooked: Any = None

    def on_train_begin(self, *args: Any, optimizer: Any = None, **kwargs: Any) -> None:
        inner = getattr(optimizer, "optimizer", optimizer)
        if inner is not self.hooked:
            self.hooked = inner
            self.clock.watch(inner, "step", "optimizer")
        self.clock.turn()
        self.clock.open.append("trainer")

    def on_train_end(self, *args: Any, **kwargs: Any) -> None:
        self.clock.turn()
        self.clock.open.pop()
