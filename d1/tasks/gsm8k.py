"""GSM8K: grade-school word problems whose answer is one number (`openai/gsm8k`, columns `question`, `answer`)."""

from __future__ import annotations

import math
import re
from collections.abc import Sequence
from typing import Any

from datasets import Dataset

from d1.tasks import MAX_TEXT, Completion, final_answer, format_completion, judged, problem
from d1.tasks.data import NUMBER, read_problems, task_rows, text_in

INSTRUCTIONS = "Solve the problem below step by step."
ANSWER = r"the final number as \boxed{number}"
TAGS = ("<reasoning>", "</reasoning>", "<answer>", "</answer>")
COLUMNS = ("question", "answer")

# Atomic groups (?>...) keep a failed search from being repeated at every later tag.
_SOFT_FORMAT = re.compile(r"\s*<reasoning>(?>.*?</reasoning>)\s*<answer>(?>.*?</answer>)", re.DOTALL)
_STRICT_FORMAT = re.compile(r"<reasoning>\n(?>.*?\n</reasoning>)\n<answer>\n(?>.*?\n</answer>)\n?", re.DOTALL)
_INTEGER = re.compile(r"-?(?:[0-9]{1,3}(?:,[0-9]{3})+|[0-9]+)")
_THOUSANDS = re.compile(r"(?<=[0-9])(?:,|\{,\}|\\,|\\!,)(?=[0-9]{3}(?![0-9]))")
_NO_THOUSANDS = re.compile(r"(?<![0-9A-Za-z.,])0[0-9,]|[0-9]{4},")  # a leading zero, four digits before a comma
_FRAC = re.compile(r"\\[dt]?frac\{\s*(-?[0-9.]+)\s*\}\{\s*([0-9.]+)\s*\}")
_DECIMAL = r"(?:[0-9]+(?:\.[0-9]+)?|\.[0-9]+)"
_NUMBER = re.compile(
    rf"(?P<sign>(?<![0-9A-Za-z)}}\]])-\s?)?(?:(?P<whole>[0-9]+)\s+(?=[0-9]+/[0-9]))?"
    rf"(?P<top>{_DECIMAL}(?:[eE][+-]?[0-9]{{1,4}})?)(?:\s*/\s*(?P<bottom>{_DECIMAL}))?"
)


def load_rows(split: str, data_file: str | None = None) -> Dataset:
    """GSM8K from the hub, or every row of `data_file`, which has the same columns (`data.read_problems`)."""
    hub = ("openai/gsm8k", "main")
    return task_rows(*read_problems(split, data_file, hub, hub, COLUMNS), _task_row, NUMBER)


def _task_row(row: dict[str, Any]) -> dict[str, Any]:
    question, (solution, mark, gold) = text_in(row, "question"), text_in(row, "answer").rpartition("####")
    value = gold_number(gold)
    if not mark or value is None:
        raise ValueError(f"answer must end with '#### number', got {gold[-80:]!r}")
    solution = re.sub(r"<<.*?>>", "", solution).strip()  # without the calculator's annotations
    return problem(question, INSTRUCTIONS, ANSWER, value, solution=solution)


def gold_number(text: str) -> float | None:
    """The number that a text is, if it has nothing else but a dollar or percent sign. None for "5 or 6", "x - 3",
    "18 eggs", and for a comma that does not separate thousands, as in "3,14"."""
    number = _NUMBER.fullmatch(_plain(text).strip().removesuffix(".").removesuffix("%").removesuffix("\\"))
    return _value(number) if number and not _NO_THOUSANDS.search(text) else None


def extract(text: str) -> float | None:
    """The number that a completion gives as its answer, or None."""
    return number_in(final_answer(text) or "")


def number_in(text: str) -> float | None:
    r"""The number in an answer: "$1,234.50", "-3", "2 1/2", "\frac{3}{4}", "5\text{ km}", "60\%" (60), "9+9=18".

    After the last equals sign, the first number counts if no letter precedes it ("18 eggs for 2 days"), else the last
    one ("in 2 days she sells 18"). None if there is no finite number.
    """
    text = _plain(text).rpartition("=")[2]
    numbers = list(_NUMBER.finditer(text))
    if not numbers:
        return None
    return _value(numbers[-1 if re.search(r"[A-Za-z]", text[: numbers[0].start()]) else 0])


def _plain(text: str) -> str:
    """The text with one form of fractions and minus signs, and without dollar signs and thousands separators."""
    text = text.replace("−", "-").replace(r"\$", "").replace("$", "")
    return _THOUSANDS.sub("", _FRAC.sub(r" \1/\2", text))


def _value(chosen: re.Match[str]) -> float | None:
    """The number of a match of `_NUMBER`, or None if it is not finite."""
    value = float(chosen["top"])
    if chosen["bottom"]:
        value = value / float(chosen["bottom"]) if float(chosen["bottom"]) else math.inf
    value += float(chosen["whole"] or 0)
    return (-value if chosen["sign"] else value) if math.isfinite(value) else None


def score(text: str, row: dict[str, Any]) -> dict[str, float]:
    return {"accuracy": float(_is_right(extract(text), row["ground_truth"]))}


def _is_right(answer: float | None, gold: float) -> bool:
    if not isinstance(gold, int | float) or isinstance(gold, bool) or not math.isfinite(gold):
        raise ValueError(f"the ground truth must be a number, got {gold!r}")
    return answer is not None and math.isclose(answer, gold, rel_tol=1e-9, abs_tol=1e-9)


def tag_count_reward(completions: Sequence[Completion], **columns: Any) -> list[float]:
    """0.125 per tag (of four) that occurs exactly once, minus 0.001 per character after the answer; at least 0."""

    def reward(text: str) -> float:
        trailing = text.rpartition("</answer>")[2].strip() if "</answer>" in text else ""
        return max(0.0, sum(0.125 for tag in TAGS if text.count(tag) == 1) - 0.001 * len(trailing))

    return judged(completions, reward)


def soft_format_reward(completions: Sequence[Completion], **columns: Any) -> list[float]:
    """0.5 if the completion starts with a reasoning block followed by an answer block."""
    return judged(completions, lambda text: 0.5 if _SOFT_FORMAT.match(text) else 0.0)


def strict_format_reward(completions: Sequence[Completion], **columns: Any) -> list[float]:
    """0.5 if the completion is exactly these two blocks, with each tag on its own line."""
    return judged(completions, lambda text: 0.5 if _STRICT_FORMAT.fullmatch(text) else 0.0)


def integer_reward(completions: Sequence[Completion], **columns: Any) -> list[float]:
    """0.5 if the answer is an integer and nothing else."""
    return judged(completions, lambda text: 0.5 if _INTEGER.fullmatch((final_answer(text) or "").strip("$ ")) else 0.0)


def correct_reward(completions: Sequence[Completion], ground_truth: Sequence[float], **columns: Any) -> list[float]:
    """2.0 if the answer is the ground truth."""
    return judged(completions, lambda text, gold: 2.0 * _is_right(extract(text), gold), ground_truth)


REWARDS = [tag_count_reward, soft_format_reward, strict_format_reward, integer_reward, correct_reward]


def demonstrate(row: dict[str, Any]) -> str:
    """The solution that comes with a training row."""
    return format_completion(row["solution"], rf"\boxed{{{row['ground_truth']:.15g}}}")


def last_number(text: str) -> float | None:
    """The last number of a completion; a new "Question:" and what follows it do not count."""
    numbers = list(_NUMBER.finditer(_plain(text[-MAX_TEXT:].partition("Question:")[0])))
    return _value(numbers[-1]) if numbers else None


def last_number_reward(completions: Sequence[Completion], ground_truth: Sequence[float], **columns: Any) -> list[float]:
    """2.0 if the last number is the ground truth."""
    return judged(completions, lambda text, gold: 2.0 * _is_right(last_number(text), gold), ground_truth)


PROTOCOLS = {
    "llada": {
        "QUESTION": "Question: {question}\nLet's think step by step.\nAnswer:",
        "SHOTS": 4,
        "demonstrate": lambda row: f"{row['solution']}\nThe answer is {row['ground_truth']:.15g}.",
        "extract": last_number,
        "score": lambda text, row: {"accuracy": float(_is_right(last_number(text), row["ground_truth"]))},
        "REWARDS": [last_number_reward],
    }
}
