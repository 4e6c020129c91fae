"""A reward that raises says who it is, for which task and which row, and leaves the row in a file."""

from __future__ import annotations

import functools
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any


class RewardError(RuntimeError):
    """A reward function raised."""


def guarded(function: Callable[..., list[float]], task: str, folder: Path) -> Callable[..., list[float]]:
    """`function` with its exceptions turned into a `RewardError` that names function, task and row."""
    if not callable(function) or hasattr(function, "forward"):
        return function  # a reward model: TRL runs those itself

    @functools.wraps(function)
    def wrapper(**kwargs: Any) -> list[float]:
        try:
            return function(**kwargs)
        except Exception as error:
            row = failing_row(function, kwargs)
            path = folder / f"reward_error_{function.__name__}.json"
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(json.dumps(row, indent=1, default=repr))
            raise RewardError(
                f"reward {function.__name__} of task {task or '?'} raised {type(error).__name__}: {error}; "
                f"the row is in {path}"
            ) from error

    return wrapper


def failing_row(function: Callable[..., list[float]], kwargs: dict[str, Any]) -> dict[str, Any]:
    """The first row that raises on its own (rewards are pure, so asking again is safe), else all rows."""
    rows = len(kwargs["completions"])
    columns = {key: value for key, value in kwargs.items() if isinstance(value, list) and len(value) == rows}
    rest = {key: value for key, value in kwargs.items() if key not in columns}
    for index in range(rows):
        row = {key: [value[index]] for key, value in columns.items()}
        try:
            function(**row, **rest)
        except Exception:
            return {"row": index} | {key: value[0] for key, value in row.items()}
    return {"row": None} | columns
