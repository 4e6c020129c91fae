"""Products of two numbers of three digits, which a pocket model cannot compute: it has to call a calculator.

The answer is the whole number in `<answer>`. `calls` are conversations for SFT that show the calculator.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from typing import Any

from datasets import Dataset

from d1.tasks import Completion, Message, final_answer, problem, reward_each
from d1.tasks.countdown import read_integer
from d1.tasks.data import JSON, file_of, read_file, task_rows
from d1.tasks.gsm8k import number_in
from d1.tasks.latex import plain_characters, unwrap

INSTRUCTIONS = "Compute the product."
ANSWER = "the number alone"
MIN_FACTOR, MAX_FACTOR = 100, 999  # range of the factors
MAX_ANSWER = 200  # characters
MAX_FLOAT = 2**53  # up to here, a float is the exact whole number
FACTORS = re.compile(r"(\d+) \* (\d+)")


def load_rows(split: str, data_file: str | None = None) -> Dataset:
    """Problems of `dataset/products_{split}.jsonl`, whose splits share no pair of factors, or of `data_file`."""
    path = file_of(split, data_file, "products_{}.jsonl")
    return task_rows(path, read_file(path, ("input", "output")), _task_row, JSON)


def _task_row(row: dict[str, Any]) -> dict[str, Any]:
    try:
        truth = read_integer(row["output"])
    except (ValueError, TypeError):
        raise ValueError(f"output must be a whole number, got {row['output']!r}") from None
    if not FACTORS.fullmatch(str(row["input"])):
        raise ValueError(f'input must be two numbers, like "370 * 461", got {row["input"]!r}')
    return problem(row["input"], INSTRUCTIONS, ANSWER, truth)


def extract(text: str) -> int | None:
    """The whole number of the answer, or None; an answer that has more than its digits is read as in GSM8K."""
    answer = unwrap(plain_characters((final_answer(text) or "")[:MAX_ANSWER]))
    digits = re.sub(r"(?<=[0-9])[ '](?=[0-9]{3})|,", "", answer)
    if re.fullmatch(r"[0-9]{1,30}", digits):
        return int(digits)
    number = number_in(answer)
    if number is None or not number.is_integer() or abs(number) > MAX_FLOAT:
        return None
    return int(number)


def score(text: str, row: dict[str, Any]) -> dict[str, float]:
    return {"accuracy": float(extract(text) == row["ground_truth"])}


def right_product(completions: Sequence[Completion], ground_truth: Sequence[Any], **columns: Any) -> list[float]:
    """1.0 for the right product, else 0."""

    def reward(text: str, truth: int) -> float:
        return float(extract(text) == truth)

    return reward_each(completions, reward, ground_truth)


REWARDS = [right_product]


def demonstrate(row: dict[str, Any]) -> str:
    """A right answer for few-shot prompts."""
    return f"<answer>{row['ground_truth']}</answer>"


def calls(question: str, product: int, with_tool: bool) -> Iterator[list[Message]]:
    """Conversations for SFT, whose last turn is learnt: an answer without a tool; or a call, and the answer from its
    result, in the format `plain` (`d1/tools/calls.py`)."""
    prompt = problem(question, INSTRUCTIONS, ANSWER, product)["prompt"]
    answer = {"role": "assistant", "content": demonstrate({"ground_truth": product})}
    if not with_tool:
        yield [*prompt, answer]
        return
    call = {"role": "assistant", "content": f"<call>{question}</call>"}
    yield [*prompt, call]
    yield [*prompt, call, {"role": "user", "content": f"<result>{product}</result>"}, answer]
