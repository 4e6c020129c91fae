"""A clock that tells the phases of a run apart."""

from __future__ import annotations

import contextlib
import functools
from collections import defaultdict
from collections.abc import Callable, Iterator
from typing import Any

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
