"""Prompt protocols: the same problems, asked and read as different papers do.

"d1" (arXiv 2504.12216) is the task module as it is: instructions, a format with <reasoning> and <answer>, no examples.
A task's other protocols are in its table `PROTOCOLS`, a name and what a module would define differently:

- `QUESTION`: the user's message, with {question} in it;
- `SHOTS`: how many solved training problems come before it, as turns of their own; 0 if left out;
- `demonstrate`, `extract`, `score`, `REWARDS`: as in `d1/tasks/__init__.py`.

"llada" is how LLaDA-8B-Instruct was evaluated (arXiv 2502.09992, table 2, and its released OpenCompass settings): the
question alone, behind four solved examples for GSM8K and none for MATH, and no format beyond that.
"""

from __future__ import annotations

from types import ModuleType
from typing import TYPE_CHECKING, Any

from d1.tasks import few_shot_messages

if TYPE_CHECKING:  # it takes a second to import, and parsers need the names alone
    from datasets import Dataset

PROTOCOLS = ("d1", "llada")  # those that tasks here know; a task file may have others
SHOT_SEED = 0  # of the examples in RL; it is the default seed of eval.py, which then shows the same


def under_protocol(task: ModuleType, name: str) -> ModuleType:
    """The task as `name` asks and reads it; the module itself for "d1".

    Raises:
        ValueError: the task has no such protocol.
    """
    if name == "d1":
        return task
    own: dict[str, dict[str, Any]] = getattr(task, "PROTOCOLS", {})
    if name not in own:
        raise ValueError(f"task {task.__name__} has no prompt protocol {name!r}: use one of {', '.join(('d1', *own))}")
    changes = dict(own[name])
    question = changes.pop("QUESTION")

    def load_rows(split: str, data_file: str | None = None) -> Dataset:
        rows = task.load_rows(split, data_file)
        prompts = [[{"role": "user", "content": question.format(question=text)}] for text in rows["question"]]
        return with_prompts(rows, prompts)

    changed = ModuleType(task.__name__, task.__doc__)
    vars(changed).update({**vars(task), **changes, "load_rows": load_rows})
    return changed


def shots_of(task: ModuleType, asked_for: int | None = None) -> int:
    """How many solved problems a prompt shows: as `asked_for`, else as the task's protocol has it."""
    return int(getattr(task, "SHOTS", 0)) if asked_for is None else asked_for


def with_shots(
    task: ModuleType, train: Dataset, data_file: str | None, asked: Dataset | None
) -> tuple[Dataset, Dataset | None]:
    """Training rows and the rows `asked` in validation, each behind the examples that the task's protocol shows.

    The problems shown are left out of the training rows.
    """
    held_out = [] if asked is None else asked["question"]
    shots = few_shot_messages(task, shots_of(task), SHOT_SEED, data_file, held_out)
    if not shots:
        return train, asked
    shown = [message["content"] for message in shots if message["role"] == "user"]
    train = train.filter(lambda row: row["prompt"][-1]["content"] not in shown)
    train, asked = (
        rows and with_prompts(rows, [shots + prompt for prompt in rows["prompt"]]) for rows in (train, asked)
    )
    return train, asked


def with_prompts(rows: Dataset, prompts: list[list[dict[str, str]]]) -> Dataset:
    from datasets import Dataset

    return Dataset.from_dict({**rows.to_dict(), "prompt": prompts}, features=rows.features)
