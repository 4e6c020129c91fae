"""One module per task: prompt, data, answer extraction, rewards and metric, for SFT, RL and evaluation.

A task module has

- `load_rows(split, data_file=None)` -> `datasets.Dataset` with the columns `prompt` (chat messages), `question`
  (str) and `ground_truth`; `split` is "train", "validation" or "test";
- `REWARDS`: reward functions `f(completions, **columns) -> list[float]`, pure and silent;
- `extract(text)` -> the answer in a completion, or None;
- `score(text, row)` -> strict metrics in [0, 1]; the first is the accuracy. It reads only `question` and
  `ground_truth` of the row;
- optionally `CONCURRENT`, how many calls of `score` may run at a time, in threads;
- optionally `demonstrate(row)` -> a model completion for a training row, for few-shot prompts;
- optionally `PROTOCOLS`: other ways to ask the same problems and to read the answers. Each entry says what changes:
  `QUESTION`, the user's message with {question} in it, and any other brace twice; `SHOTS`, how many solved training
  problems come before it as turns of their own (default 0); `demonstrate`, `extract`, `score`, `REWARDS` as above.

The protocol "d1" (arXiv 2504.12216) is the module itself: instructions, a format with `<reasoning>` and `<answer>`, no
examples. "llada" is how LLaDA-8B-Instruct was evaluated (arXiv 2502.09992, table 2, and its released OpenCompass
settings): the question with at most one line of instructions, after four solved examples for GSM8K and none for MATH.
"""

from __future__ import annotations

import functools
import importlib
import random
import re
from collections.abc import Callable, Sequence
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING, Any

from d1.hub import closest
from d1.lazy import functions_in, module_in

if TYPE_CHECKING:  # it takes a second to import, and parsers need only the names
    from datasets import Dataset

TASKS = {
    "gsm8k": "d1.tasks.gsm8k",
    "math": "d1.tasks.math500",
    "countdown": "d1.tasks.countdown",
    "sudoku": "d1.tasks.sudoku",
    "pocket_countdown": "d1.tasks.pocket_countdown",
    "arithmetic": "d1.tasks.arithmetic",
    "code": "d1.tasks.code",
    "programs": "d1.tasks.programs",
    "products": "d1.tasks.products",
    "svamp": "d1.tasks.svamp",
}
PROTOCOLS = ("d1", "llada")  # those of the tasks here; a task file may have others
PROTOCOL_CHANGES = ("SHOTS", "demonstrate", "extract", "score", "REWARDS")  # besides QUESTION
SHOT_SEED = 0  # seed of the examples in RL; eval.py has the same default seed, so it shows the same examples
SPLITS = ("train", "validation", "test")
DATA_FILES = (".json", ".jsonl", ".csv", ".parquet")  # endings of files of problems
MAX_TEXT = 50_000  # only this many characters of a completion are read, the last ones

Message = dict[str, str]
Completion = str | Sequence[Message]

_SPECIAL_TOKEN = re.compile(r"<\|[^<>|]{1,40}\|>")
_BRACE = re.compile(r"\\(?:fbox|boxed)\s*\{|\\[\\{}]|[{}]")
# A box without braces has a number or a command: "\boxed 5", not "in \boxed form".
_BARE_BOX = re.compile(
    r"\\(?:fbox|boxed)(?![A-Za-z])[ \t]*(?=\S{0,20}[0-9]|\\[A-Za-z])((?:[^\s{}$<\\]|\\[A-Za-z]+|\\[^\s]|\{[^{}]*\})+)"
)
_FORMAT = "Think inside <reasoning> and </reasoning>, then give {answer} inside <answer> and </answer>."


def load_task(name_or_path: str) -> ModuleType:
    """The task module for a name in `TASKS`, or for the path of a user's own `.py` file.

    Raises:
        ValueError: there is no such task, or the file lacks a name that a task needs.
        FileNotFoundError: there is no such file.
    """
    if name_or_path in TASKS:
        return importlib.import_module(TASKS[name_or_path])
    if not name_or_path.endswith(".py"):
        if name_or_path.endswith(DATA_FILES):
            raise ValueError(
                f"{name_or_path!r} is a file of problems, not a task: pass it as --data_file, next to --dataset TASK, "
                f"which says how they are asked and judged: one of {', '.join(TASKS)}, or a path to a .py file"
            )
        hint = closest(name_or_path, TASKS) or closest(name_or_path.rpartition("/")[2], TASKS)
        raise ValueError(f"unknown task {name_or_path!r}{hint}: use one of {', '.join(TASKS)}, or a path to a .py file")
    path = Path(name_or_path).resolve()
    if not path.is_file():
        raise FileNotFoundError(f"no task file {path}{closest(str(path))}")
    module = module_in(path, f"d1_user_task_{path.stem}")
    faults = []
    for name in ("load_rows", "extract", "score"):
        if not callable(getattr(module, name, None)):
            faults.append(f"{name} (a function)")
    rewards = getattr(module, "REWARDS", None)
    if not isinstance(rewards, list | tuple) or not rewards or not all(map(callable, rewards)):
        faults.append("REWARDS (a list of reward functions)")
    if faults:
        raise ValueError(f"task file {path} does not define {', '.join(faults)}; see d1/tasks/__init__.py")
    vars(module)["load_rows"] = _with_checked_rows(module.load_rows, path)
    return module


def _with_checked_rows(load_rows: Callable[..., Any], path: Path) -> Callable[..., Dataset]:
    """The function `load_rows` of a task file, with a ValueError if it returns anything but a `Dataset`."""

    @functools.wraps(load_rows)
    def load_checked_rows(*args: Any, **options: Any) -> Dataset:
        from datasets import Dataset, DatasetDict

        rows = load_rows(*args, **options)
        if isinstance(rows, Dataset):
            return rows
        advice = "return Dataset.from_list(rows)"
        if isinstance(rows, DatasetDict):
            advice = f"return one of its splits, {', '.join(rows)}"
        raise ValueError(f"load_rows of {path} returned {type(rows).__name__}, not datasets.Dataset: {advice}")

    return load_checked_rows


def under_protocol(task: ModuleType, name: str) -> ModuleType:
    """The task under the protocol `name`; the module itself for "d1"."""
    if name == "d1":
        return task
    protocols: dict[str, dict[str, Any]] = getattr(task, "PROTOCOLS", {})
    if name not in protocols:
        raise ValueError(
            f"task {task.__name__} has no prompt protocol {name!r}: use one of {', '.join(('d1', *protocols))}"
        )
    changes = dict(protocols[name])
    if "QUESTION" not in changes:
        raise ValueError(f"prompt protocol {name!r} of task {task.__name__} has no QUESTION, the user's message")
    question = changes.pop("QUESTION")
    unknown = set(changes) - set(PROTOCOL_CHANGES)
    if unknown:
        raise ValueError(
            f"prompt protocol {name!r} of task {task.__name__} has {', '.join(sorted(unknown))}: "
            f"it may change QUESTION, {', '.join(PROTOCOL_CHANGES)}"
        )
    try:
        asks_question = question.format(question="1") != question.format(question="2")
    except (LookupError, ValueError):  # other fields, or a single brace
        asks_question = False
    if not asks_question:
        raise ValueError(
            f"QUESTION of prompt protocol {name!r} of task {task.__name__} must have {{question}} where the problem "
            f"goes, and other braces twice, as in \\boxed{{{{}}}}, got {question!r:.80}"
        )

    def load_rows(split: str, data_file: str | None = None) -> Dataset:
        rows = task.load_rows(split, data_file)
        prompts = [[{"role": "user", "content": question.format(question=text)}] for text in rows["question"]]
        return _with_prompts(rows, prompts)

    return _copy_task(task, **changes, load_rows=load_rows)


def with_rewards(task: ModuleType, file: str | None) -> ModuleType:
    """The task with the functions of a `.py` file as further rewards, in their order in the file.

    Imported functions, and those whose name begins with an underscore, are no rewards. None: the task itself. Raises
    ValueError if the file has another ending or no function, or if a function has the name of another reward;
    FileNotFoundError if there is no such file.
    """
    if file is None:
        return task
    path = Path(file).resolve()
    if path.suffix != ".py":
        raise ValueError(f"--reward_file {file}: expected the path of a .py file with reward functions")
    if not path.is_file():
        raise FileNotFoundError(f"no reward file {path}")
    rewards = functions_in(path, f"d1_user_rewards_{path.stem}")
    if not rewards:
        raise ValueError(f"reward file {path} defines no function: write f(completions, **columns) -> list of numbers")
    other_names = {"accuracy"}  # every run logs it
    for reward in task.REWARDS:
        other_names.add(getattr(reward, "__name__", ""))
    for reward in rewards:
        if reward.__name__ in other_names:
            raise ValueError(
                f"reward file {path}: there is another reward {reward.__name__}, and the log shows rewards by name: "
                "rename the function"
            )
    return _copy_task(task, REWARDS=[*task.REWARDS, *rewards])


def without_rewards(task: ModuleType) -> ModuleType:
    """The task without its rewards."""
    return _copy_task(task, REWARDS=[])


def _copy_task(task: ModuleType, **changes: Any) -> ModuleType:
    copy = ModuleType(task.__name__, task.__doc__)
    vars(copy).update({**vars(task), **changes})
    return copy


def _with_prompts(rows: Dataset, prompts: list[list[Message]]) -> Dataset:
    from datasets import Dataset

    return Dataset.from_dict({**rows.to_dict(), "prompt": prompts}, features=rows.features)


def ask(question: str, instructions: str, answer: str) -> list[Message]:
    """The chat prompt for a question: instructions, the required format, and the question at the very end."""
    return [{"role": "user", "content": f"{instructions} {_FORMAT.format(answer=answer)}\n\n{question}"}]


def problem(question: str, instructions: str, answer: str, ground_truth: Any, **columns: Any) -> dict[str, Any]:
    """The row of a problem whose prompt is `ask(question, instructions, answer)`."""
    return {
        "prompt": ask(question, instructions, answer),
        "question": question,
        "ground_truth": ground_truth,
        **columns,
    }


def shots_of(task: ModuleType, few_shot: int | None = None) -> int:
    """How many solved problems a prompt shows: `few_shot`, or by default the number of the task's protocol."""
    if few_shot is not None:
        return few_shot
    return int(getattr(task, "SHOTS", 0))


def with_shots(
    task: ModuleType,
    train: Dataset,
    data_file: str | None,
    validation: Dataset | None,
    few_shot: int | None = None,
) -> tuple[Dataset, Dataset | None]:
    """Training and validation rows, each with examples before its prompt: `few_shot`, or by default the number of the
    task's protocol.

    The problems of the examples are removed from the training rows.
    """
    held_out = [] if validation is None else validation["question"]
    shots = few_shot_messages(task, shots_of(task, few_shot), SHOT_SEED, data_file, held_out)
    if not shots:
        return train, validation
    shot_questions = [message["content"] for message in shots if message["role"] == "user"]
    train = train.filter(lambda row: row["prompt"][-1]["content"] not in shot_questions)

    train = _with_prompts(train, [insert_shots(shots, prompt) for prompt in train["prompt"]])
    if validation is not None:
        validation = _with_prompts(validation, [insert_shots(shots, prompt) for prompt in validation["prompt"]])
    return train, validation


def few_shot_messages(
    task: ModuleType, count: int, seed: int, data_file: str | None = None, held_out: Sequence[str] = ()
) -> list[Message]:
    """`count` solved problems as user/assistant turns, for `insert_shots`; without the system message of a prompt.

    They are drawn with `seed` from the task's training split (or from `data_file`, which then holds training
    problems). The questions `held_out` are never drawn.
    """
    if count == 0:
        return []
    if not callable(getattr(task, "demonstrate", None)):
        raise ValueError(
            f"task {task.__name__} has no demonstrate(row), so it cannot be prompted few-shot; use --few_shot 0"
        )
    rows = task.load_rows("train", data_file)
    excluded = set(held_out)
    usable = [index for index, question in enumerate(rows["question"]) if question not in excluded]
    if not 0 < count <= len(usable):
        raise ValueError(f"--few_shot must be between 0 and the {len(usable)} training rows, got {count}")
    messages: list[Message] = []
    for index in random.Random(seed).sample(usable, count):
        row = rows[index]
        _, prompt = _split_system(row["prompt"])
        messages += [*prompt, {"role": "assistant", "content": task.demonstrate(row)}]
    return messages


def insert_shots(shots: Sequence[Message], prompt: Sequence[Message]) -> list[Message]:
    """The prompt with the turns of solved problems in front of it, after its system message."""
    system, turns = _split_system(prompt)
    return [*system, *shots, *turns]


def _split_system(prompt: Sequence[Message]) -> tuple[Sequence[Message], Sequence[Message]]:
    """The system message at the beginning of a prompt, if there is one, and the rest."""
    count = 1 if prompt and prompt[0]["role"] == "system" else 0
    return prompt[:count], prompt[count:]


def format_completion(reasoning: str, answer: str) -> str:
    """A completion in the format that every prompt asks for."""
    return f"<reasoning>\n{reasoning}\n</reasoning>\n<answer>\n{answer}\n</answer>"


def text_of(completion: Completion) -> str:
    """The text of a completion as TRL passes it: a string, or chat messages of which the last one counts."""
    if isinstance(completion, str):
        return completion
    return str(completion[-1].get("content") or "") if completion else ""


def answer_block(text: str) -> str | None:
    """The content of the last `<answer>` block of `text` (to the end of the text if it is not closed), or None."""
    text = _SPECIAL_TOKEN.sub("", text[-MAX_TEXT:])
    _, tag, block = text.rpartition("<answer>")
    if not tag:
        return None
    return block.partition("</answer>")[0].strip()


def last_boxed(text: str) -> str | None:
    r"""The content of the last outermost balanced `\boxed{...}` of `text`, with inner boxes unwrapped, or None.

    A box without braces, "\boxed 5", ends at the next space; it counts if it stands behind the last one with braces.
    """
    text = text[-MAX_TEXT:]
    opened: list[re.Match[str]] = []
    content = None
    last_box = ""  # with its command and braces
    end = 0
    for brace in _BRACE.finditer(text):
        token = brace.group()
        if token == "}" and opened:
            opening = opened.pop()
            if len(opening.group()) > 2:  # a box
                # An outer box closes after the inner ones, and replaces them unless it holds nothing else.
                inside = text[opening.end() : brace.start()].strip()
                if content is None or inside != last_box:
                    content = inside
                last_box = text[opening.start() : brace.end()]
                end = brace.end()
        elif token == "{" or len(token) > 2:
            opened.append(brace)
    for bare_box in _BARE_BOX.finditer(text, end):
        content = bare_box[1]
    inner = _BARE_BOX.fullmatch(content or "")
    if inner:
        return inner[1]
    return content


def final_answer(text: str) -> str | None:
    r"""The final answer of a completion, as text, or None.

    It is the last `\boxed{}` of the last `<answer>` block, else that block, else the last `\boxed{}` anywhere.
    """
    block = answer_block(text)
    boxed = last_boxed(block if block else text)
    return boxed or block or None


def reward_each(completions: Sequence[Completion], value: Callable[..., float], *columns: Sequence[Any]) -> list[float]:
    """`value(text, *cells)` of each completion; `cells` are the values of its row in `columns`."""
    values = []
    for completion, *cells in zip(completions, *columns, strict=True):
        values.append(value(text_of(completion), *cells))
    return values
