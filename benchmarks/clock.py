"""A clock that tells the phases of a run apart, and the callback that starts it with a training run."""

from __future__ import annotations

import contextlib
import functools
from collections import defaultdict
from collections.abc import Callable, Iterator
from typing import Any

from transformers import TrainerCallback

from benchmarks.machine import now


class Clock:
    """Wall and processor seconds by phase. A phase entered within another stops the outer one's clock."""

    def __init__(self) -> None:
        self.wall: dict[str, float] = defaultdict(float)
        self.cpu: dict[str, float] = defaultdict(float)
        self.open: list[str] = []
        self.since = 0.0, 0.0

    def turn(self) -> None:
        """Books the time since the last turn to the innermost open phase."""
        wall, cpu = now()
        if self.open:
            self.wall[self.open[-1]] += wall - self.since[0]
            self.cpu[self.open[-1]] += cpu - self.since[1]
        self.since = wall, cpu

    @contextlib.contextmanager
    def phase(self, name: str) -> Iterator[None]:
        self.turn()
        self.open.append(name)
        try:
            yield
        finally:
            self.turn()
            self.open.pop()

    def timed(self, function: Callable[..., Any], name: str | Callable[[], str]) -> Callable[..., Any]:
        """`function`, whose time is booked to phase `name`, or to the phase that `name()` says at each call."""

        @functools.wraps(function)
        def run(*args: Any, **kwargs: Any) -> Any:
            with self.phase(name if isinstance(name, str) else name()):
                return function(*args, **kwargs)

        return run

    def watch(self, owner: Any, method: str, name: str) -> None:
        """Books what `owner.method` takes to phase `name` from now on."""
        setattr(owner, method, self.timed(getattr(owner, method), name))


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
