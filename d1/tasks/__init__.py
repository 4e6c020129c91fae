"""One module a task: prompt, data, answer extraction, rewards and metric, used by SFT, RL and evaluation alike.

A task module has
- `load_rows(split, data_file=None)` -> `datasets.Dataset` with the columns `prompt` (chat messages), `question`
  (str) and `ground_truth`; `split` is "train", "validation" or "test";
- `REWARDS`: reward functions `f(completions, **columns) -> list[float]`, pure and silent;
- `extract(text)` -> the answer in a completion, or None;
- `score(text, row)` -> strict metrics in [0, 1], the first being the accuracy; of the row it needs only `question`
  and `ground_truth`;
- optionally `demonstrate(row)` -> a model completion for a training row, for few-shot prompts;
- optionally `PROTOCOLS`: other ways to ask and to read the same problems (`d1/tasks/protocols.py`).
"""

from __future__ import annotations

import importlib
import random
import re
from collections.abc import Callable, Sequence
from pathlib import Path
from types import ModuleType
from typing import Any

from d1.lazy import module_in

TASKS = {
    "gsm8k": "d1.tasks.gsm8k",
    "math": "d1.tasks.math500",
    "countdown": "d1.tasks.countdown",
    "sudoku": "d1.tasks.sudoku",
    "pocket_countdown": "d1.tasks.pocket_countdown",
    "arithmetic": "d1.tasks.arithmetic",
}
SPLITS = ("train", "validation", "test")
MAX_TEXT = 50_000  # characters of a completion that are looked at, from its end

Message = dict[str, str]
Completion = str | Sequence[Message]

_SPECIAL_TOKEN = re.compile(r"<\|[^<>|]{1,40}\|>")
_BRACE = re.compile(r"\\(?:fbox|boxed)\s*\{|\\[\\{}]|[{}]")
_FORMAT = "Think inside <reasoning> and </reasoning>, then give {answer} inside <answer> and </answer>."


def load_task(name_or_path: str) -> ModuleType:
    """The task module of a name in `TASKS`, or of a user's own `.py` file.

    Raises:
        ValueError: no such task, or the file lacks a name a task needs.
        FileNotFoundError: no such file.
    """
    if name_or_path in TASKS:
        return importlib.import_module(TASKS[name_or_path])
    if not name_or_path.endswith(".py"):
        raise ValueError(f"unknown task {name_or_path!r}: use one of {', '.join(TASKS)}, or a path to a .py file")
    path = Path(name_or_path).resolve()
    if not path.is_file():
        raise FileNotFoundError(f"no task file {path}")
    module = module_in(path, f"d1_user_task_{path.stem}")
    functions = ("load_rows", "extract", "score")
    faults = [f"{name} (a function)" for name in functions if not callable(getattr(module, name, None))]
    rewards = getattr(module, "REWARDS", None)
    if not isinstance(rewards, list | tuple) or not rewards or not all(map(callable, rewards)):
        faults.append("REWARDS (a list of reward functions)")
    if faults:
        raise ValueError(f"task file {path} does not define {', '.join(faults)}; see d1/tasks/__init__.py")
    return module


def ask(question: str, instructions: str, answer: str) -> list[Message]:
    """The chat prompt of a question: instructions, the format wanted, and the question at the very end."""
    return [{"role": "user", "content": f"{instructions} {_FORMAT.format(answer=answer)}\n\n{question}"}]


def few_shot_messages(
    task: ModuleType, count: int, seed: int, data_file: str | None = None, asked: Sequence[str] = ()
) -> list[Message]:
    """`count` solved problems as user/assistant turns, to put before a problem's own `prompt`.

    They are drawn with `seed` from the task's training split (or from `data_file`, which then holds training
    problems), never from the questions `asked`.

    Raises:
        ValueError: the task has no `demonstrate`, or fewer than `count` training rows.
    """
    if count == 0:
        return []
    if not callable(getattr(task, "demonstrate", None)):
        raise ValueError(
            f"task {task.__name__} has no demonstrate(row), so it cannot be prompted few-shot; use --few_shot 0"
        )
    rows = task.load_rows("train", data_file)
    held_out = set(asked)
    usable = [index for index, question in enumerate(rows["question"]) if question not in held_out]
    if not 0 < count <= len(usable):
        raise ValueError(f"--few_shot must be between 0 and the {len(usable)} training rows, got {count}")
    messages: list[Message] = []
    for index in random.Random(seed).sample(usable, count):
        row = rows[index]
        messages += [*row["prompt"], {"role": "assistant", "content": task.demonstrate(row)}]
    return messages


def format_completion(reasoning: str, answer: str) -> str:
    """A completion in the format every prompt asks for."""
    return f"<reasoning>\n{reasoning}\n</reasoning>\n<answer>\n{answer}\n</answer>"


def text_of(completion: Completion) -> str:
    """The text of a completion as TRL passes it: a string, or chat messages of which the last one counts."""
    if isinstance(completion, str):
        return completion
    return str(completion[-1].get("content") or "") if completion else ""


def answer_block(text: str) -> str | None:
    """What the last `<answer>` block of `text` holds (to the end if it is not closed), or None without one."""
    text = _SPECIAL_TOKEN.sub("", text[-MAX_TEXT:])
    _, tag, block = text.rpartition("<answer>")
    return block.partition("</answer>")[0].strip() if tag else None


def last_boxed(text: str) -> str | None:
    r"""What the last outermost balanced `\boxed{...}` of `text` holds, boxes within it unwrapped, or None."""
    text = text[-MAX_TEXT:]
    open_braces: list[tuple[re.Match[str], bool]] = []
    content, whole = None, ""
    for brace in _BRACE.finditer(text):
        token = brace.group()
        if token == "}" and open_braces:
            opening, is_box = open_braces.pop()
            if is_box:  # an outer box closes after those within, and replaces them unless it holds nothing else
                inside = text[opening.end() : brace.start()].strip()
                content = content if content is not None and inside == whole else inside
                whole = text[opening.start() : brace.end()]
        elif token == "{" or len(token) > 2:
            open_braces.append((brace, len(token) > 2))
    return content


def final_answer(text: str) -> str | None:
    r"""The answer a completion settles on, as text, or None.

    It is the last `\boxed{}` of the last `<answer>` block, else that block, else the last `\boxed{}` anywhere.
    """
    block = answer_block(text)
    boxed = last_boxed(block if block else text)
    return boxed or block or None


def judged(
    completions: Sequence[Completion],
    columns: dict[str, Any],
    value: Callable[..., float],
    needs: Sequence[str] = ("ground_truth",),
) -> list[float]:
    """`value(text, *cells)` of each completion, with what its row holds in the columns `needs`.

    Raises:
        KeyError: a column is missing; lists those that were passed.
    """
    for name in needs:
        if name not in columns:
            raise KeyError(f"the reward needs the column {name!r}; the rows have {', '.join(sorted(columns))}")
    rows = zip(completions, *(columns[name] for name in needs), strict=True)
    return [value(text_of(completion), *cells) for completion, *cells in rows]
