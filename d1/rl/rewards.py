"""The checks of reward functions, the accuracy as a reward, and the weighted sum.

A reward is a number that is finite as float32, or None if the function does not apply (TRL's convention). Anything else
ends the run with an error that names the function, the task and the row. Before a run, `check_rewards` calls each
function once; during the run, `guard_reward` watches its calls.
"""

from __future__ import annotations

import asyncio
import functools
import inspect
import json
import logging
import math
import sysconfig
import traceback
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from types import ModuleType
from typing import Any

import torch
from datasets import Dataset
from torch import Tensor
from transformers import TrainerState
from trl.trainer.utils import get_callable_name, is_async_callable

from d1.runs.cli import RunError
from d1.tasks import text_of

logger = logging.getLogger(__name__)

Reward = Callable[..., Any]
# Folders of code that is not the user's: Python's, that of installed packages, d1's
LIBRARIES = [*map(sysconfig.get_path, ("stdlib", "purelib", "platlib")), str(Path(__file__).parents[1])]


SPEED = "tokens_per_forward_pass"  # a field of the rollout: a completion's tokens / the forward passes of its row


class RewardError(RunError):
    """A reward function raised an error, or returned something that is not a reward."""


class InvalidRewardError(ValueError):
    """A function did not return a list of rewards."""


def reward_or_none(value: Any, row: int) -> float | None:
    """A number of Python, NumPy or PyTorch as a float; None stays None. Raises InvalidRewardError for anything else."""
    if value is None:
        return None
    try:
        number = None if isinstance(value, str | bytes) else float(value)
    except (TypeError, ValueError, RuntimeError):
        number = None
    except OverflowError:  # an integer above the range of floats
        number = math.inf
    if number is None or not torch.tensor(number, dtype=torch.float32).isfinite():
        problem = "is not a number" if number is None else "is not finite as float32"
        raise InvalidRewardError(
            f"returned {value!r:.80} for row {row}, which {problem} (return None if it does not apply)"
        )
    return number


def parse_rewards(values: Any, rows: int) -> list[float | None]:
    """What a reward function returned, as one float or None per row. Raises InvalidRewardError for anything else."""
    if isinstance(values, str | bytes | dict) or not hasattr(values, "__iter__"):
        raise InvalidRewardError(f"returned {type(values).__name__}, not a list with one reward per row")
    listed = list(values)
    if len(listed) != rows:
        raise InvalidRewardError(f"returned {len(listed)} rewards for {rows} rows")
    return [reward_or_none(value, row) for row, value in enumerate(listed)]


def rewards_of(function: Reward, **kwargs: Any) -> list[float | None]:
    """The rewards that a function, `async` or not, gives each row. InvalidRewardError if it returned something else."""
    if is_async_callable(function):
        with ThreadPoolExecutor(1) as thread:  # the caller's thread may be running an event loop
            values = thread.submit(asyncio.run, function(**kwargs)).result()
    else:
        values = function(**kwargs)
    return parse_rewards(values, len(kwargs["completions"]))


def names_of_rewards(functions: Sequence[Any]) -> list[str]:
    """The names of reward functions in the log. A name that an earlier function has gets a number, because the log
    averages the values of a name."""
    names: list[str] = []
    for function in functions:
        name = numbered = get_callable_name(function)
        number = 1
        while numbered in names:
            number += 1
            numbered = f"{name}_{number}"
        names.append(numbered)
    return names


def guard_reward(function: Reward, task: str, folder: Path, name: str | None = None) -> Reward:
    """Wraps `function` for TRL: anything but rewards becomes a `RewardError`, and Nones are counted.

    The share of rows for which it returned None is logged as `rewards/NAME/none_share`.

    Args:
        task: the task's name, for the error message.
        folder: an error writes the rows of the batch into this folder, as reward_error_NAME.json.
        name: that of the function in the log; None: its own.
    """
    if not callable(function) or hasattr(function, "forward"):
        return function  # a reward model, which TRL runs itself
    name = name or get_callable_name(function)

    @contextmanager
    def refusing(kwargs: dict[str, Any]) -> Iterator[None]:
        try:
            yield
        except Exception as error:
            path = folder / f"reward_error_{name}.json"
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(json.dumps(kwargs, indent=1, default=repr))
            raise RewardError(
                f"reward {name} of task {task or '?'} {describe_failure(function, error)}; {path} has its arguments"
            ) from error

    def counted(values: Any, kwargs: dict[str, Any]) -> list[float | None]:
        rewards = parse_rewards(values, len(kwargs["completions"]))
        log_metric = kwargs.get("log_metric")
        if log_metric and not getattr(function, "is_accuracy", False):
            log_metric(f"rewards/{name}/none_share", rewards.count(None) / max(len(rewards), 1))
        return rewards

    def wrapper(**kwargs: Any) -> list[float | None]:
        with refusing(kwargs):
            return counted(function(**kwargs), kwargs)

    async def async_wrapper(**kwargs: Any) -> list[float | None]:
        with refusing(kwargs):
            return counted(await function(**kwargs), kwargs)

    guarded: Reward = wrapper
    if is_async_callable(function):
        guarded = async_wrapper
    guarded = functools.wraps(function)(guarded)
    guarded.__name__ = name  # which partials and instances lack
    return guarded


def describe_failure(function: Reward, error: Exception) -> str:
    """What a reward function did, with its file and line: where it raised, or where it begins if it could not be called
    or returned what is not a reward."""
    inner = inspect.unwrap(getattr(function, "func", function))  # of a partial
    code = getattr(inner, "__code__", None) or getattr(type(inner).__call__, "__code__", None)
    where = f" ({code.co_filename}, line {code.co_firstlineno})" if code is not None else ""
    if isinstance(error, InvalidRewardError):
        return f"{error}{where}"
    frames = traceback.extract_tb(error.__traceback__)
    users = [frame for frame in frames if is_users_file(frame.filename)]
    if users or code is None or not is_users_file(code.co_filename):
        frame = (users or frames)[-1]
        where = f" ({frame.filename}, line {frame.lineno})"
    return f"raised {type(error).__name__}: {error}{where}"


def is_users_file(file: str) -> bool:
    return not any(map(Path(file).is_relative_to, LIBRARIES))


def accuracy_of(task: ModuleType) -> Reward:
    """The task's strict metric as a reward function, the last one of a run (`is_accuracy`): of weight 0, so that it is
    logged but not trained on, or of weight 1 with `--accuracy_reward`."""

    def accuracy(completions: list, question: list, ground_truth: list, **columns: Any) -> list[float]:
        rows = [{"question": q, "ground_truth": truth} for q, truth in zip(question, ground_truth, strict=True)]
        return [next(iter(task.score(text_of(c), row).values())) for c, row in zip(completions, rows, strict=True)]

    accuracy.is_accuracy = True  # type: ignore[attr-defined]  # `functools.wraps` copies this
    return accuracy


def tokens_per_forward_pass(completions: list, tokens_per_forward_pass: list, **columns: Any) -> list[float]:
    """The speed of a completion as its reward: its tokens, with the EOS, divided by the forward passes of its row."""
    return list(tokens_per_forward_pass)


def check_rewards(task: ModuleType, rows: Dataset, name: str, what: str = "rows") -> None:
    """Calls every reward of task `name` on an empty completion of the first of these rows; `what` they are, for the
    message.

    Raises:
        ValueError: a reward raises an error, or returns something that `parse_rewards` refuses.
    """
    columns: dict[str, Any] = {key: [value] for key, value in rows[0].items() if key != "prompt"}
    columns["prompts"] = [rows[0]["prompt"]]
    columns["completion_ids"] = [[]]
    columns[SPEED] = [1.0]
    columns["trainer_state"] = TrainerState()
    columns["log_extra"] = columns["log_metric"] = lambda *_: None
    completions = [[{"role": "assistant", "content": ""}]]
    for reward in [*task.REWARDS, accuracy_of(task)]:
        try:
            rewards_of(reward, completions=completions, **columns)
        except Exception as error:
            raise ValueError(
                f"reward {get_callable_name(reward)} of task {name} cannot score its {what} (it "
                f"{describe_failure(reward, error)}); they have the columns {', '.join(rows.column_names)}"
            ) from error


def weighted_sum(rewards: Tensor, weights: Tensor) -> Tensor:
    """(rows,) weighted sums of rewards (rows, functions); NaN, which stands for None, adds nothing. The sum of a row
    to which no reward applies is NaN.

    Raises:
        RewardError: a sum is not finite as float32. TRL would continue with advantages of 0.
    """
    is_missing = rewards.isnan().all(dim=1)
    without = int(is_missing.sum())
    if without:
        logger.warning("%d of %d completions are left out, because no reward applies to them.", without, len(rewards))
    sums = (rewards * weights).nansum(dim=1)
    for row in (~sums.isfinite()).nonzero().flatten().tolist():
        raise RewardError(
            f"the rewards {rewards[row].tolist()} of row {row} with weights {weights.tolist()} sum to "
            f"{sums[row].item()}, which is not finite as float32: make the rewards or --reward_weights smaller"
        )
    return sums.masked_fill(is_missing, math.nan)
