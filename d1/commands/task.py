"""python -m d1 task new FILE: write a task file, with a few problems, that evaluation and RL run at once."""

from __future__ import annotations

import shlex
import sys
from dataclasses import dataclass
from pathlib import Path

from d1.ranges import setting

TEMPLATE = '''"""A task: the problems, how an answer is found and judged, and the rewards of RL. It runs as it is:

    python -m d1 eval --model_path MODEL --dataset FILE
    python -m d1 rl --model_path MODEL --dataset FILE --max_steps 20

Change the parts 1 to 3 for problems of your own. All that a task can have: d1/tasks/__init__.py.
"""

import json
from pathlib import Path

from datasets import Dataset

from d1.tasks import final_answer, problem, text_of

# 1. The problems. RL trains on "train", its evaluations use "validation", and `d1 eval` uses "test". With
#    --data_file FILE, the problems of a split come from a file: one JSON object per line, with "question" and "answer".
PROBLEMS = {
    "train": [(12, 5, 3, 9), (23, 8, 2, 6), (31, 9, 4, 7), (44, 3, 8, 2), (57, 6, 9, 4), (18, 7, 5, 3), (65, 4, 6, 8)],
    "validation": [(52, 7, 3, 8), (19, 9, 2, 4), (33, 4, 9, 5)],
    "test": [(16, 8, 5, 9), (27, 3, 6, 2), (62, 9, 4, 3), (74, 5, 7, 6), (38, 6, 2, 7)],
}
INSTRUCTIONS = "Solve the problem step by step."  # before each question; d1 adds the tags for reasoning and answer
ANSWER = "the number alone"  # what the model is asked to write inside <answer> and </answer>


def apples_problem(first, found, lost, found_later):
    text = f"Ann has {first} apples. She finds {found}. She loses {lost}. She finds {found_later}. How many apples?"
    return {"question": text, "answer": str(first + found - lost + found_later)}


def load_rows(split, data_file=None):
    """The rows of a split: chat messages in `prompt`, and `question` and `ground_truth`."""
    if data_file is None:
        rows = [apples_problem(*numbers) for numbers in PROBLEMS[split]]
    else:
        rows = [json.loads(line) for line in Path(data_file).read_text().splitlines() if line.strip()]
    return Dataset.from_list([problem(row["question"], INSTRUCTIONS, ANSWER, row["answer"]) for row in rows])


# 2. How an answer is found and judged. The first number of `score` is the accuracy.
def extract(text):
    """The answer in a completion, or None: the content of the last <answer> block or \\\\boxed{}."""
    return final_answer(text)


def score(text, row):
    return {"accuracy": float(extract(text) == row["ground_truth"])}


# 3. The rewards of RL, which are added up. Each gets all completions of a batch, and the columns of the rows by name.
#    Rewards that are equal for all completions of a prompt teach nothing.
def correct_reward(completions, ground_truth, **columns):
    answers = [extract(text_of(completion)) for completion in completions]
    return [float(answer == truth) for answer, truth in zip(answers, ground_truth, strict=True)]


def number_reward(completions, **columns):
    """A little for any whole number, right or wrong."""
    answers = [extract(text_of(completion)) or "" for completion in completions]
    return [0.1 * answer.isdecimal() for answer in answers]


REWARDS = [correct_reward, number_reward]
'''


@dataclass(frozen=True, kw_only=True)
class TaskFlags:
    action: str = setting(help="new: write a file to start from", positional=True, metavar="new", choices=("new",))
    file: Path = setting(help="a .py file that does not exist yet", positional=True, metavar="FILE", type=Path)


def run(args: TaskFlags) -> None:
    """Write the file, and name it and its use on stderr."""
    file = args.file
    if not file.name:
        raise ValueError("FILE is empty: name the Python file to write, such as my_task.py")
    if file.suffix != ".py":
        raise ValueError(f"{file}: a task is a Python file: name it {file.with_suffix('.py')}")
    if not file.parent.is_dir():
        raise FileNotFoundError(f"there is no folder {file.parent} to write {file.name} into")
    shown = shlex.quote(str(file))
    try:
        with file.open("x", encoding="utf-8") as opened:  # never replaces a file
            opened.write(TEMPLATE.replace("FILE\n", f"{shown}\n", 1).replace("FILE --max", f"{shown} --max", 1))
    except FileExistsError:
        raise FileExistsError(f"{file} is already there: choose another name, or delete it first") from None
    sys.stderr.write(
        f"Written: {file}. It runs as it is: python -m d1 eval --model_path MODEL --dataset {shown}, "
        "and d1 rl with the same --dataset\n"
    )
