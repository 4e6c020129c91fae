"""What a reward function may return, whom the error names otherwise, and rows to which no reward applies."""

from __future__ import annotations

import asyncio
import functools
import inspect
import json
import math
import re
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import pytest
import torch
from trl import ModelConfig

from d1.rl import train as diffu_grpo_train
from d1.rl.config import DiffuGRPOConfig
from d1.rl.rewards import RewardError, accuracy_of, check_rewards, guard_reward, rewards_of, weighted_sum
from d1.tasks import load_task, with_rewards
from tests.tiny_grpo import SETTINGS

LETTERS = Path(__file__).with_name("letters_task.py")
letters_task: Any = load_task(str(LETTERS))
COLUMNS: dict[str, Any] = {"completions": ["a", "b", "c"], "letter": ["x", "y", "z"], "step": 7}
NUMBERS = [1, True, 0.5, np.float32(0.25), np.int64(3), np.bool_(False), torch.tensor(1.5), None]
BAD: dict[str, tuple[Any, str]] = {  # what is returned, and the message
    "nan": ([0.0, 1.0, math.nan], "returned nan for row 2, which is not finite as float32"),
    "inf": ([0.0, np.float32("-inf"), math.nan], r"returned np.float32\(-inf\) for row 1, which is not finite"),
    "nan tensor": (torch.tensor([math.nan, 0.0, 0.0]), r"returned tensor\(nan\) for row 0, which is not finite"),
    "too large": ([3e38, 1e300, 0.0], r"returned 1e\+300 for row 1, which is not finite as float32"),
    "an integer too large": ([0.0, 0.0, 10**400], "returned 10+[0.]+ for row 2, which is not finite as float32"),
    "string": (["0.5", 1.0, 1.0], "returned '0.5' for row 0, which is not a number"),
    "list": ([1.0, [1.0, 2.0], 1.0], r"returned \[1.0, 2.0\] for row 1, which is not a number"),
    "complex": ([1.0, 1.0, 1j], "returned 1j for row 2, which is not a number"),
    "too few": ([1.0], "returned 1 rewards for 3 rows"),
    "text": ("abc", "returned str, not a list"),
    "a dict": ({0: 1.0, 1: 1.0, 2: 1.0}, "returned dict, not a list"),
    "nothing": (None, "returned NoneType, not a list"),
}


def constant(values: Any, kind: str = "def", name: str = "odd") -> Any:
    """A reward function, plain or `async`, that returns `values`."""

    def odd(completions: list, **columns: Any) -> Any:
        return values

    async def odd_later(completions: list, **columns: Any) -> Any:
        return values

    made = odd if kind == "def" else odd_later
    made.__name__ = name
    return made


def call(function: Any, **columns: Any) -> Any:
    returned = function(**columns)
    return asyncio.run(returned) if inspect.iscoroutine(returned) else returned


@pytest.mark.parametrize("container", [list, tuple, iter, np.array, torch.tensor])
def test_numbers_and_none_pass_as_they_are(tmp_path: Path, container: Any) -> None:
    values = NUMBERS if container in (list, tuple, iter) else [0.5, 1.0, -2.0]
    columns = {"completions": ["a"] * len(values)}
    found = call(guard_reward(constant(container(values)), "task", tmp_path), **columns)
    assert found == [None if value is None else float(value) for value in values]
    assert {type(value) for value in found} <= {float, type(None)}
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("kind", ["def", "async def"])
@pytest.mark.parametrize("case", BAD)
def test_what_is_no_reward_names_function_task_and_row(tmp_path: Path, kind: str, case: str) -> None:
    values, problem = BAD[case]
    reward = guard_reward(constant(values, kind), "letters", tmp_path / "run")
    with pytest.raises(RewardError, match=rf"reward odd of task letters {problem}.*reward_error_odd.json has its"):
        call(reward, **COLUMNS)
    assert json.loads((tmp_path / "run" / "reward_error_odd.json").read_text()) == COLUMNS


class Instance:
    def __call__(self, letter: list, **columns: Any) -> list[float]:
        return brittle(letter, **columns)


def brittle(letter: list, **columns: Any) -> list[float]:
    if "y" in letter:
        raise KeyError("no such letter")
    return [0.0] * len(letter)


async def later(letter: list, **columns: Any) -> list[float]:
    return brittle(letter, **columns)


@pytest.mark.parametrize(
    ("function", "name"),
    [(brittle, "brittle"), (later, "later"), (Instance(), "Instance"), (functools.partial(brittle), "brittle")],
)
def test_a_function_that_raises_is_named(tmp_path: Path, function: Any, name: str) -> None:
    with pytest.raises(RewardError, match=rf"reward {name} of task t raised KeyError: .*no such letter"):
        call(guard_reward(function, "t", tmp_path), **COLUMNS)


@pytest.mark.parametrize("kind", ["def", "async def"])
def test_an_error_names_the_line_of_the_users_file(tmp_path: Path, kind: str) -> None:
    file = tmp_path / "mine.py"
    file.write_text(
        f"""import json

def value(text):
    return json.loads(text)  # line 4, although json raises in a file of its own

{kind} parsed(completions, **columns):
    return [value(text) for text in completions]

{kind} short(completions, **columns):  # line 9
    return []
"""
    )
    *_, parsed, short = with_rewards(letters_task, str(file)).REWARDS
    where = re.escape(str(file))
    with pytest.raises(RewardError, match=rf"parsed of task t raised JSONDecodeError: .* \({where}, line 4\)"):
        call(guard_reward(parsed, "t", tmp_path), **COLUMNS)
    with pytest.raises(RewardError, match=rf"returned 0 rewards for 3 rows \({where}, line 9\)"):
        call(guard_reward(short, "t", tmp_path), **COLUMNS)
    with pytest.raises(RewardError, match=r"returned \[\] for row 0, which .*test_rewards\.py, line \d+\)"):
        call(guard_reward(functools.partial(constant([[]])), "t", tmp_path), completions=["a"])
    rows = letters_task.load_rows("train")
    for reward, where in ((parsed, r"it raised TypeError: .*, line 4"), (short, r"it returned 0 rewards .*, line 9")):
        with pytest.raises(ValueError, match=rf"cannot score its rows \({where}\)\); they have the columns"):
            check_rewards(letters_with([reward]), rows, "letters")


@pytest.mark.parametrize("kind", ["def", "async def"])
def test_the_share_of_none_is_logged(tmp_path: Path, kind: str) -> None:
    logged: dict[str, float] = {}
    reward = guard_reward(constant([None, 1.0, None], kind), "task", tmp_path)
    assert call(reward, **COLUMNS, log_metric=logged.__setitem__) == [None, 1.0, None]
    assert logged == {"rewards/odd/none_share": 2 / 3}


def letters_with(rewards: list) -> ModuleType:
    task = ModuleType("letters")
    task.__dict__.update({**vars(letters_task), "REWARDS": rewards})
    return task


@pytest.mark.parametrize("kind", ["def", "async def"])
@pytest.mark.parametrize("values", [[0.0, 1.0], [math.nan]])
def test_what_cannot_work_is_refused_at_the_start(kind: str, values: Any) -> None:
    rows = letters_task.load_rows("train")
    with pytest.raises(
        ValueError, match=r"reward odd of task letters cannot score its rows \(it returned .*columns pro"
    ):
        check_rewards(letters_with([letters_task.letter_share, constant(values, kind)]), rows, "letters")
    check_rewards(letters_with([constant([None], kind), constant([1], kind)]), rows, "letters")


def test_the_sum_of_rewards_is_finite_as_float32() -> None:
    rewards, weights = torch.tensor([[1.0, math.nan], [math.nan, math.nan], [3e38, 2.0]]), torch.tensor([1.0, 0.5])
    assert weighted_sum(rewards, weights).tolist() == [1.0, 0.0, torch.tensor(3e38).item()]
    for first, second in ((2.0, 1.0), (10.0, -1e38)):  # inf; inf - inf
        with pytest.raises(RewardError, match=r"of row 2 with weights .* sum to (inf|nan), which is not finite"):
            weighted_sum(torch.tensor([[0.0, 0.0], [1.0, 1.0], [3e38, 3e38]]), torch.tensor([first, second]))


def test_accuracy_is_the_tasks_first_metric() -> None:
    completions = [[{"role": "assistant", "content": text}] for text in ("a b", "b", " c")]
    found = rewards_of(accuracy_of(letters_task), completions=completions, question=[*"abc"], ground_truth=[*"aac"])
    assert found == [1.0, 0.0, 1.0]


def run_task(task: Path, model: Path, folder: Path, **changes: Any) -> list[dict[str, float]]:
    """The training logs of a run with four completions per step on a task file."""
    own = {"output_dir": str(folder), "model_path": str(model), "dataset": str(task), "num_iterations": 1, "beta": 0.0}
    settings: dict[str, Any] = SETTINGS | own | changes
    trainer = diffu_grpo_train.main(DiffuGRPOConfig(**settings), ModelConfig())
    assert trainer is not None
    return [entry for entry in trainer.state.log_history if "loss" in entry]


def write_task(folder: Path, body: str) -> Path:
    path = folder / "task.py"
    path.write_text(LETTERS.read_text() + "\n\n" + body)
    return path


@pytest.mark.parametrize("kind", ["def", "async def"])
def test_a_row_no_reward_applies_to_is_left_out_and_warned_of(
    tiny_model_dir: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture, kind: str
) -> None:
    body = f"""
{kind} first_half(completions, **columns):
    return [1.0, 1.0, None, None] if len(completions) == 4 else [None]

{kind} none_but_the_last(completions, **columns):
    return [None, 1.0, 1.0, None] if len(completions) == 4 else [None]

REWARDS = [first_half, none_but_the_last]
"""
    task = write_task(tmp_path, body)
    for log in run_task(task, tiny_model_dir, tmp_path / "run"):
        assert log["rewards/first_half/none_share"] == log["rewards/none_but_the_last/none_share"] == 0.5
        assert log["reward"] == pytest.approx(4 / 3)  # 1, 2 and 1: the last row does not count as 0
        assert log["rewards/first_half/mean"] == 1.0
        assert 0 <= log["rewards/accuracy/mean"] <= 1
    assert "1 of 4 completions are left out" in caplog.text


def test_accuracy_is_that_of_the_completions_and_rewards_are_trls(tiny_model_dir: Path, tmp_path: Path) -> None:
    """If no reward is None, all logged rewards follow from the completions that a reward function saw."""
    body = """
import json
from pathlib import Path

def first_letter(completions, ground_truth, **columns):
    texts = [completion[0]["content"] for completion in completions]
    values = [float(text[:1] < "i") for text in texts]
    seen = [extract(text) == truth for text, truth in zip(texts, ground_truth)]
    if len(texts) == 8:
        with Path(__file__).with_name("seen.jsonl").open("a") as lines:
            lines.write(json.dumps([values, seen]) + "\\n")
    return values

def extract(text):
    return "a" if sum(map(ord, text)) % 3 else "no"

def score(text, row):
    return {"accuracy": float(extract(text) == row["ground_truth"])}

def load_rows(split, data_file=None):
    prompt = [{"role": "user", "content": "x"}]
    return Dataset.from_list([{"prompt": prompt, "question": "x", "ground_truth": "a"}] * 8)

REWARDS = [first_letter]
"""
    task = write_task(tmp_path, body)
    logs = run_task(task, tiny_model_dir, tmp_path / "run", per_device_train_batch_size=8)
    seen = [json.loads(line) for line in (tmp_path / "seen.jsonl").read_text().splitlines()]
    assert len(seen) == len(logs) == 2
    for log, (values, correct) in zip(logs, seen, strict=True):
        reward, accuracy = torch.tensor(values), torch.tensor(correct, dtype=torch.float32)
        assert log["rewards/first_letter/mean"] == log["reward"] == reward.mean().item()
        assert log["rewards/accuracy/mean"] == accuracy.mean().item()
        assert log["rewards/accuracy/std"] == pytest.approx(accuracy.std().item(), abs=1e-7)
        assert log["rewards/first_letter/none_share"] == 0.0
        assert "rewards/accuracy/none_share" not in log
    assert any(0 < sum(correct) < 8 for _, correct in seen)


def test_a_run_ends_at_a_reward_that_is_not_a_number(tiny_model_dir: Path, tmp_path: Path) -> None:
    body = """
calls = []

def worse(completions, **columns):
    calls.append(0)
    return [0.0] * (len(completions) - 1) + [float("nan") if len(calls) > 2 else 1.0]

REWARDS = [worse]
"""
    task = write_task(tmp_path, body)
    with pytest.raises(RewardError, match=rf"reward worse of task {task} returned nan for row 3, "):
        run_task(task, tiny_model_dir, tmp_path / "run", max_steps=5)
    left = json.loads((tmp_path / "run" / "reward_error_worse.json").read_text())
    assert left["completions"][3][0]["role"] == "assistant"
