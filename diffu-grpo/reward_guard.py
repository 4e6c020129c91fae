"""A reward that raises says who it is, for which task and which row, and leaves the row in a file."""

from __future__ import annotations

import asyncio
import functools
import json
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, NoReturn

from trl.trainer.utils import get_callable_name, is_async_callable


class RewardError(RuntimeError):
    """A reward function raised."""


def rewards_of(function: Callable[..., Any], **kwargs: Any) -> list[float | None]:
    """What a reward function returns, whether it is `async` or not."""
    if not is_async_callable(function):
        return function(**kwargs)
    with ThreadPoolExecutor(1) as thread:  # the caller's may be running an event loop
        return thread.submit(asyncio.run, function(**kwargs)).result()


def guarded(function: Callable[..., Any], task: str, folder: Path) -> Callable[..., Any]:
    """`function` with its exceptions turned into a `RewardError` that names function, task and row."""
    if not callable(function) or hasattr(function, "forward"):
        return function  # a reward model: TRL runs those itself
    name = get_callable_name(function)

    def refuse(error: Exception, kwargs: dict[str, Any]) -> NoReturn:
        path = folder / f"reward_error_{name}.json"
        path.parent.mkdir(parents=True, exist_ok=True)
        row = failing_row(function, kwargs)
        path.write_text(json.dumps(row, indent=1, default=repr))
        where = "no single row" if row["row"] is None else f"row {row['row']} of its batch"
        raise RewardError(
            f"reward {name} of task {task or '?'} raised {type(error).__name__}: {error}, on {where}; see {path}"
        ) from error

    def wrapper(**kwargs: Any) -> list[float | None]:
        try:
            return function(**kwargs)
        except Exception as error:
            refuse(error, kwargs)

    async def async_wrapper(**kwargs: Any) -> list[float | None]:
        try:
            return await function(**kwargs)
        except Exception as error:
            refuse(error, kwargs)

    chosen = functools.wraps(function)(async_wrapper if is_async_callable(function) else wrapper)
    chosen.__name__ = name  # which partials and instances lack
    return chosen


def failing_row(function: Callable[..., Any], kwargs: dict[str, Any]) -> dict[str, Any]:
    """The first row that raises on its own (rewards are pure, so asking again is safe), else all rows."""
    rows = len(kwargs["completions"])
    columns = {key: value for key, value in kwargs.items() if isinstance(value, list) and len(value) == rows}
    rest = {key: value for key, value in kwargs.items() if key not in columns}
    for index in range(rows):
        row = {key: [value[index]] for key, value in columns.items()}
        try:
            rewards_of(function, **row, **rest)
        except Exception:
            return {"row": index} | {key: value[0] for key, value in row.items()}
    return {"row": None} | columns
