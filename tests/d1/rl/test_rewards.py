"""What a reward function may return, whom the error names otherwise, and rows to which no reward applies."""

from __future__ import annotations

import asyncio
import functools
import inspect
import json
import math
import re
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from datasets import Dataset
from trl import ModelConfig

from d1.masking import keyed_generator
from d1.rl import train as diffu_grpo_train
from d1.rl.batch import RankView, has_equal_rewards, prompt_filter, select_prompt_share, transform_advantages
from d1.rl.config import DiffuGRPOConfig
from d1.rl.losses import ADVANTAGES, AdvantageInputs
from d1.rl.rewards import RewardError, accuracy_of, check_rewards, guard_reward, rewards_of, weighted_sum
from d1.rl.stage import never_differed
from d1.rl.trainer import DiffuGRPOTrainer
from d1.tasks import load_task, with_rewards
from tests.tiny_grpo import SETTINGS, is_even, logged, make_method, make_trainer, repeats_letter

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


def test_rewards_of_one_name_are_logged_apart(tiny_model_dir: Path, tmp_path: Path) -> None:
    def same(completions: list, value: float, **columns: Any) -> list[float]:
        return [value] * len(completions)

    rewards = [functools.partial(same, value=value) for value in (1.0, 2.0, 4.0)]
    trainer = make_trainer(tiny_model_dir, tmp_path, reward=rewards, max_steps=1)
    trainer.train()
    [log] = logged(trainer)
    assert [log[f"rewards/{name}/mean"] for name in ("same", "same_2", "same_3")] == [1.0, 2.0, 4.0]


def test_states_of_plain_prompts_are_rewarded_as_their_completions_are(tiny_model_dir: Path, tmp_path: Path) -> None:
    """Where a prompt is a text, TRL gives rewards texts, not messages."""
    kinds = set()

    def kind(completions: list, **columns: Any) -> list[float]:
        kinds.update(map(type, completions))
        return [0.0] * len(completions)

    trainer = make_method(tiny_model_dir, tmp_path, "egspo-sa", reward=kind, reward_weights=None, max_steps=1)
    trainer.train_dataset = Dataset.from_list([{"prompt": letter * 24} for letter in "abcd"])
    trainer.train()
    assert kinds == {str}


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
    first, missing, last = weighted_sum(rewards, weights).tolist()
    assert (first, last) == (1.0, torch.tensor(3e38).item())
    assert math.isnan(missing)
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


# --- Completions to which no reward applies ---------------------------------------------------------------------------

HERE = RankView(lambda here: here, 0)
FOUR: list[Any] = [0.0, 1.0, 5.0, None]  # the rewards of a prompt's completions


class KeptBatch(DiffuGRPOTrainer):
    """Keeps the batch of its last rollout."""

    def after_rollout(self, batch: Any) -> None:
        super().after_rollout(batch)
        self.batch = batch


def rewarded(model_dir: Path, folder: Path, method: str, values: list[Any], **changes: Any) -> Any:
    """The batch of a rollout of one method, whose completions have these rewards in turn."""

    def reward(completions: list, **columns: Any) -> list[Any]:
        return (values * len(completions))[: len(completions)]

    options: dict[str, Any] = {"reward": [reward, is_even], "max_steps": 1, "per_device_train_batch_size": 8}
    trainer = make_method(model_dir, folder, method, KeptBatch, **(options | changes))
    trainer.train()
    return trainer.batch


@pytest.mark.parametrize("name", [name for name, entry in ADVANTAGES.items() if not entry.over_rollout])
def test_a_group_with_a_missing_reward_is_changed_without_it_and_other_groups_as_before(name: str) -> None:
    """Of three prompts, the second lacks one reward and the third all but one; they span two processes."""
    entry, run = ADVANTAGES[name], SimpleNamespace(reward_temperature=0.04)
    values = torch.tensor([-1.0, 0.5, 0.5, -2.0, 0.0, 2.0, 0.0, 0.0, 0.0])
    missing = torch.tensor([False, False, False, False, True, False, True, True, False])
    generator = keyed_generator(0)
    bounds = {"lengths": torch.full((9,), 8.0)}
    for field in ("old_bounds", "reference_bounds"):
        bounds[field] = -torch.rand(9, generator=generator)
    fields = {"advantages": values}
    if entry.reads:
        fields |= bounds

    def changed(rows: list[int]) -> list[float]:
        if entry.of is None:
            return values[rows].tolist()
        inputs = AdvantageInputs(**{field: of_rows[rows].unsqueeze(0) for field, of_rows in fields.items()})
        return entry(inputs, run).squeeze(0).tolist()

    first, second = changed([0, 1, 2]), changed([3, 5])
    expected = [*first, second[0], 0.0, second[1], 0.0, 0.0, 0.0]
    of_reads = bounds if entry.reads else {}
    found = transform_advantages(values, name, 3, HERE, bounds=of_reads, settings=run, missing=missing)
    assert found.tolist() == pytest.approx(expected, rel=1e-6)
    without = transform_advantages(values, name, 3, HERE, bounds=of_reads, settings=run, missing=missing & False)
    assert torch.equal(without, transform_advantages(values, name, 3, HERE, bounds=of_reads, settings=run))
    # The same on the second of two processes, which holds the last four rows.
    whole = iter([values, *of_reads.values(), missing])
    rank = RankView(lambda here: next(whole), 5)
    of_rank = {field: of_rows[5:] for field, of_rows in of_reads.items()}
    there = transform_advantages(values[5:], name, 3, rank, bounds=of_rank, settings=run, missing=missing[5:])
    assert there.tolist() == pytest.approx(expected[5:], rel=1e-6)


def test_an_advantage_over_the_rollout_leaves_missing_rewards_out() -> None:
    values, missing = torch.tensor([1.0, 2.0, 0.0, 6.0]), torch.tensor([False, False, True, False])
    found = transform_advantages(values, "standardised_batch", 2, HERE, missing=missing)
    assert found.tolist() == pytest.approx([-2 / 7**0.5, -1 / 7**0.5, 0.0, 3 / 7**0.5], rel=1e-6)


@pytest.mark.parametrize("method", ["wd1", "tracerl", "dmpo"])
def test_a_completion_without_a_reward_has_no_part_in_its_group(
    tiny_model_dir: Path, tmp_path: Path, method: str
) -> None:
    options = {"right_share": None, "num_generations": 4}
    found = rewarded(tiny_model_dir, tmp_path, method, FOUR, **options)["advantages"].view(2, 4)
    assert found[:, 3].tolist() == [0.0, 0.0]
    if method == "wd1":
        centred = torch.tensor([-2.0, -1.0, 3.0])
        expected = 3 * (centred.softmax(0) - (-centred).softmax(0))
        torch.testing.assert_close(found[:, :3], expected.expand(2, 3))
    assert (found[:, 0] < 0).all()
    assert (found[:, 2] > 0).all()


def test_in_trees_and_states_a_missing_reward_is_in_no_mean(tiny_model_dir: Path, tmp_path: Path) -> None:
    batch = rewarded(tiny_model_dir, tmp_path / "tree", "d-treerpo", FOUR)
    found = batch["view_advantages"].view(2, 4, 2)
    # The root's children have the values .5 and 5, the mean of one reward.
    assert found[:, ::2, 0].tolist() == [[-4.5, 4.5]] * 2
    assert found[..., 1].tolist() == [[-1.0, 1.0, 0.0, 0.0]] * 2
    # States have the rewards of their completions here: a share of a reward r is r / (1 + lam), with lam = .5.
    batch = rewarded(tiny_model_dir, tmp_path / "states", "egspo-sa", FOUR)
    scoring = batch["view_weights"].ne(0).any(-1).any(1).view(2, 4, -1)
    found = batch["view_advantages"].view(2, 4, -1)
    for prompt in range(2):
        for view in range(scoring.shape[2]):
            rows = [row for row in range(3) if scoring[prompt, row, view]]
            expected = [0.0] * 4
            for row in rows:
                expected[row] = (FOUR[row] - sum(FOUR[other] for other in rows) / len(rows)) / 1.5
            assert found[prompt, :, view].tolist() == pytest.approx(expected, abs=1e-6)
    assert scoring[:, 3].any()
    assert found.any()


def test_prompts_are_chosen_by_the_completions_that_have_a_reward() -> None:
    """Two prompts whose rewards are equal but for one that is missing, next to one whose rewards differ."""
    rewards = torch.tensor([1.0, 1.0, math.nan, 0.0, 1.0, 0.0, math.nan, 0.0, 0.0])
    batch: dict[str, Any] = {"completion_reward": rewards, "completion_mask": torch.ones(9, 4)}
    batch["reveal_steps"] = torch.zeros(9, 4, dtype=torch.long)
    for seed in range(20):
        kept = select_prompt_share(batch, 1 / 3, 3, HERE, keyed_generator(seed))
        assert kept.tolist() == [False, True, False]
    speeds = torch.tensor([1.0, 1.0, 3.0, 1.0, 2.0, 1.0, 9.0, 2.0, 2.0])
    assert prompt_filter(batch | {"tokens_per_forward_pass": speeds}, None, 3, HERE, 0.5).tolist() == [
        False,
        True,
        False,
    ]


def test_equal_rewards_are_equal_whatever_their_mean_is_rounded_to() -> None:
    """The mean of eight times 0.3 is not 0.3 in fp32. Neither a missing reward nor the size of a group changes this."""
    for group in (2, 6, 8, 12):
        for value in (0.1, 0.3, 1 / 3, 1.7):
            rewards = torch.full((3, group), value)
            rewards[1, 0] = math.nan
            rewards[2, -1] += 0.1
            assert has_equal_rewards(rewards).tolist() == [True, True, False]
    assert has_equal_rewards(torch.full((1, 4), math.nan)).tolist() == [True]
    rewards = torch.tensor([[0.3] * 8, [math.nan] + [0.3] * 7, [0.3] * 7 + [0.4]])
    batch: dict[str, Any] = {"completion_reward": rewards.flatten(), "completion_mask": torch.ones(24, 4)}
    batch["reveal_steps"] = torch.zeros(24, 4, dtype=torch.long)
    for seed in range(20):
        assert select_prompt_share(batch, 1 / 3, 8, HERE, keyed_generator(seed)).tolist() == [False, False, True]


def test_hinted_groups_leave_missing_rewards_out(tiny_model_dir: Path, tmp_path: Path) -> None:
    def last_is_missing(completions: list, letter: list, **columns: Any) -> list[Any]:
        right = repeats_letter(completions, letter)
        return [None if row % 4 == 3 else 1.0 + 2 * value for row, value in enumerate(right)]

    batch = rewarded(
        tiny_model_dir, tmp_path, "igpo", [], reward=[last_is_missing, repeats_letter], ends=(2, 25, 28, 32)
    )
    assert batch["given"].any()
    rewards, advantages = batch["completion_reward"].view(2, 4), batch["advantages"].view(2, 4)
    assert rewards[:, 3].isnan().all()
    expected = (rewards - rewards.nanmean(1, keepdim=True)).nan_to_num(0.0)
    torch.testing.assert_close(advantages, expected)


@pytest.mark.parametrize("scale", ["none", "group", "batch"])
def test_groups_with_equal_rewards_are_counted_however_advantages_are_scaled(
    tiny_model_dir: Path, tmp_path: Path, scale: str
) -> None:
    """Of two prompts: both with equal rewards of their own, then one. Of one prompt: equal rewards whose mean is
    rounded to another number."""

    def run(values: list[float], group: int = 4) -> Any:
        def reward(completions: list, **columns: Any) -> list[float]:
            return values[: len(completions)]

        options: dict[str, Any] = {"reward": reward, "reward_weights": None, "per_device_train_batch_size": 8}
        options |= {"scale_rewards": scale, "num_generations": group, "max_steps": 1}
        trainer = make_method(tiny_model_dir, tmp_path, "d1", **options)
        trainer.train()
        return trainer

    equal, differing = run([1.0] * 4 + [2.0] * 4), run([1.0] * 4 + [2.0, 1.0, 2.0, 2.0])
    rounded = run([0.3] * 8, group=8)
    assert never_differed(equal.state.log_history)
    assert never_differed(rounded.state.log_history)
    assert logged(equal)[0]["frac_reward_zero_std"] == 1
    assert logged(differing)[0]["frac_reward_zero_std"] == 0.5


def test_what_a_reward_logs_of_states_is_in_no_rollout(tiny_model_dir: Path, tmp_path: Path) -> None:
    """EGSPO-SA rewards the greedy completions of states, too; its logs are those of the sampled completions."""
    seen: list[list[str]] = []

    def lengths(completions: list, log_extra: Any, log_metric: Any, **columns: Any) -> list[float]:
        texts = [completion[0]["content"] for completion in completions]
        seen.append(texts)
        log_extra("text", texts)
        log_metric("calls", float(len(seen)))
        return [float(len(text)) for text in texts]

    class Compared(DiffuGRPOTrainer):
        def after_rollout(self, batch: Any) -> None:
            self.calls = [*getattr(self, "calls", []), len(seen)]
            completions = [completion[0]["content"] for completion in self._logs["completion"]]
            assert [*self._logs["extra"]["text"]] == completions
            super().after_rollout(batch)

    options: dict[str, Any] = {"reward": [lengths, is_even], "max_steps": 4, "num_iterations": 2}
    trainer = make_method(tiny_model_dir, tmp_path, "egspo-sa", Compared, **options)
    trainer.train()
    first, second = trainer.calls
    assert second > first + 1  # states were rewarded between the rollouts
    logs = [entry["calls"] for entry in trainer.state.log_history if "calls" in entry]
    assert logs == [first, second]


def test_an_accuracy_that_is_a_reward_applies_where_no_other_reward_does(tiny_model_dir: Path, tmp_path: Path) -> None:
    batch = rewarded(tiny_model_dir, tmp_path, "d1", [0.5, None], reward_weights=[1.0, 1.0])
    right = batch["completion_is_right"]
    assert not right.isnan().any()
    assert torch.equal(batch["completion_reward"], right + torch.tensor([0.5, 0.0] * 4))
    logged_only = rewarded(tiny_model_dir, tmp_path, "d1", [0.5, None], reward_weights=[1.0, 0.0])
    assert logged_only["completion_is_right"].isnan().tolist() == [False, True] * 4


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
