"""MATH: competition problems with a LaTeX answer (train `ankner/math-500`, test `HuggingFaceH4/MATH-500`)."""

from __future__ import annotations

import math
import re
from collections.abc import Sequence
from typing import Any

from datasets import Dataset

from d1.tasks import Completion, answer_block, final_answer, format_completion, last_boxed, problem, reward_each
from d1.tasks.data import TEXT, read_problems, task_rows, text_in
from d1.tasks.maths import equivalent

INSTRUCTIONS = "Solve the mathematics problem below step by step."
ANSWER = r"the final answer as \boxed{answer}"
SCHEMAS = (("problem", "answer"), ("problem", "solution"))

_INLINE_MATH = re.compile(r"(?<!\\)\$((?:\\.|[^$\\]){1,500}?)\$|\\\((.{1,500}?)\\\)", re.DOTALL)
_BETWEEN_VALUES = re.compile(r"\s*(?:,|;|,?\s*(?:and|or))\s*")


def load_rows(split: str, data_file: str | None = None) -> Dataset:
    """MATH from the hub, or every row of `data_file`: `problem`, and `answer` or a `solution` that has the answer in a
    box (`data.read_problems`)."""
    train = ("ankner/math-500", None)
    test = ("HuggingFaceH4/MATH-500", None)
    source, rows = read_problems(split, data_file, train, test, *SCHEMAS)
    return task_rows(source, rows, _task_row, TEXT)


def _task_row(row: dict[str, Any]) -> dict[str, Any]:
    question = text_in(row, "problem")
    solution = row.get("solution") or ""
    answer = row.get("answer")
    if not isinstance(solution, str):
        raise ValueError(f"solution must be a text, got {solution!r:.80}")
    if answer in (None, ""):
        answer = last_boxed(solution)
    gold = ""
    if isinstance(answer, str):
        gold = answer.strip()
    elif isinstance(answer, int | float) and not isinstance(answer, bool) and math.isfinite(answer):
        gold = str(answer)
    if not gold:
        raise ValueError(rf"answer must be LaTeX text, a number, or a \boxed{{}} of the solution, got {answer!r:.80}")
    return problem(question, INSTRUCTIONS, ANSWER, gold, solution=solution)


def extract(text: str) -> str | None:
    r"""The answer's LaTeX, or None: the content of a box, else the last formula of the answer block, else the block.

    Formulas with nothing but a comma, "and" or "or" between them are one answer: "$1$ and $2$".
    """
    answer = (final_answer(text) or "")[-2000:]  # bounds the search; the last formula counts
    values: list[str] = []
    end = 0
    for formula in _INLINE_MATH.finditer(answer):
        if not _BETWEEN_VALUES.fullmatch(answer, end, formula.start()):
            values = []
        values.append("".join(filter(None, formula.groups())).strip())
        end = formula.end()
    if values:
        answer = ", ".join(values)
    return answer or None


def score(text: str, row: dict[str, Any]) -> dict[str, float]:
    return {"accuracy": float(_is_correct(text, row["ground_truth"]))}


def _is_correct(text: str, gold: str) -> bool:
    if not isinstance(gold, str) or not gold.strip():
        raise ValueError(f"the ground truth must be LaTeX text, got {gold!r}")
    answer = extract(text)
    return answer is not None and equivalent(answer, gold)


def correct_reward(completions: Sequence[Completion], ground_truth: Sequence[str], **columns: Any) -> list[float]:
    """2.0 if the answer is equivalent to the ground truth."""

    def reward(text: str, gold: str) -> float:
        return 2.0 * _is_correct(text, gold)

    return reward_each(completions, reward, ground_truth)


def boxed_in_answer_reward(completions: Sequence[Completion], **columns: Any) -> list[float]:
    r"""1.0 for `\boxed{}` inside answer tags, 0.75 for the tags alone, 0.5 for a box alone, 0.25 for neither."""

    def reward(text: str) -> float:
        block = answer_block(text) if "</answer>" in text else None
        boxed = last_boxed(text if block is None else block) is not None
        if block is not None:
            return 1.0 if boxed else 0.75
        return 0.5 if boxed else 0.25

    return reward_each(completions, reward)


REWARDS = [correct_reward, boxed_in_answer_reward]


def demonstrate(row: dict[str, Any]) -> str:
    """The solution that comes with a training row."""
    if not row["solution"]:
        raise ValueError("few-shot prompts need training rows with a solution column")
    return format_completion(row["solution"], rf"\boxed{{{row['ground_truth']}}}")


def boxed_reward(completions: Sequence[Completion], **columns: Any) -> list[float]:
    r"""0.5 for a `\boxed{}` anywhere in the text."""

    def reward(text: str) -> float:
        return 0.0 if last_boxed(text) is None else 0.5

    return reward_each(completions, reward)


def _plain_solution(row: dict[str, Any]) -> str:
    """The solution that comes with a training row, with its answer in a box."""
    if last_boxed(row["solution"]) is None:
        raise ValueError("few-shot prompts need training rows with a solution column")
    return row["solution"]


PROTOCOLS = {
    "llada": {
        "QUESTION": "{question}\nReason step by step and end with the answer in \\boxed{{}}.",
        "demonstrate": _plain_solution,
        "REWARDS": [correct_reward, boxed_reward],
    }
}
