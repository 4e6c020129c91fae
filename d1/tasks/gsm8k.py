"""GSM8K: grade-school word problems whose answer is one number (`openai/gsm8k`, columns `question`, `answer`)."""

from __future__ import annotations

import math
import re
from collections.abc import Sequence
from itertools import pairwise
from typing import Any

from datasets import Dataset

from d1.tasks import MAX_TEXT, Completion, final_answer, format_completion, problem, reward_each
from d1.tasks.data import NUMBER, read_problems, task_rows, text_in
from d1.tasks.latex import DEGREES, FRACTION_SIGNS, TEXT, plain_characters, unwrap

INSTRUCTIONS = "Solve the problem below step by step."
ANSWER = r"the final number as \boxed{number}"
TAGS = ("<reasoning>", "</reasoning>", "<answer>", "</answer>")
COLUMNS = ("question", "answer")
MAX_MARKUP = 2000  # characters; a longer answer is searched for numbers as it is

# Atomic groups (?>...) keep a failed search from being repeated at every later tag.
_SOFT_FORMAT = re.compile(r"\s*<reasoning>(?>.*?</reasoning>)\s*<answer>(?>.*?</answer>)", re.DOTALL)
_STRICT_FORMAT = re.compile(r"<reasoning>\n(?>.*?\n</reasoning>)\n<answer>\n(?>.*?\n</answer>)\n?", re.DOTALL)
_INTEGER = re.compile(r"-?(?:[0-9]{1,3}(?:,[0-9]{3})+|[0-9]+)")
_THOUSANDS = re.compile(r"(?<=[0-9])(?:,|\{,\}|\\[,;: ]|\\!,|,\\!)(?=[0-9]{3}(?![0-9]))")
_SPACED_THOUSANDS = re.compile(r"(?<![0-9.,])[0-9]{1,3}(?:(?:[ ~][0-9]{3})+|(?:'[0-9]{3})+)(?![0-9])")
_LAKHS = re.compile(r"(?<![0-9.,])[0-9]{1,2}(?:,[0-9]{2})+,[0-9]{3}(?![0-9])")
_NO_THOUSANDS = re.compile(r"(?<![0-9A-Za-z.,])0[0-9,]|[0-9]{4},")  # a leading zero, four digits before a comma
# A dash that is no minus: behind a word ("Total - 18", but not "is - 18"), or before an item of a list, on a line
# after the first ("- 18 eggs")
_PUNCTUATION = re.compile(
    r"(?<=[A-Za-z.:;,)])\s+[–—―]\s+|(?<=[A-Za-z]{2})(?<!\bis)(?<!\bare)(?<!\bwas)(?<!\bof)(?<!\bequals)\s+-\s+|"
    r"(?<=\n)[ \t]*[-–—―]\s+(?=\\?[$€£¥]?\s*[0-9][0-9.,]*\s+[A-Za-z]{2})"
)
_COMMAND = re.compile(rf"{TEXT}\{{([^{{}}]*)\}}")
_PER = re.compile(r"/(?=\s*[A-Za-z])")  # in a command, as in \text{/hour}
_FRAC = re.compile(r"\\[dtc]?frac\s*(?:\{\s*(-?[0-9.]+)\s*\}|([0-9]))\s*(?:\{\s*([0-9.]+)\s*\}|([0-9]))")
_OPEN_FRACTION = re.compile(r"\\[dtc]?frac\s*(?=\{)")  # what `_FRAC` has left: its parts are no numbers
_DECIMAL = r"(?:[0-9]+(?:\.[0-9]+)?|(?<![A-Za-z])\.[0-9]+)"  # "Rs.18" is 18
_NUMBER = re.compile(
    rf"(?P<sign>(?<![0-9A-Za-z)}}\]])-\s?)?(?:(?P<whole>[0-9]+)\s+(?=[0-9]+/[0-9]))?"
    rf"(?P<top>{_DECIMAL}(?:[eE][+-]?[0-9]{{1,4}})?)(?:\s*/\s*(?P<bottom>{_DECIMAL}))?"
)

_SCALES = {"hundred": 100, "thousand": 10**3, "million": 10**6, "billion": 10**9, "trillion": 10**12}
_SCALE = re.compile(rf"\s*({'|'.join(_SCALES)})(?![A-Za-z])", re.IGNORECASE)
_OPERAND = r"\s*(?:[0-9(\\]|[A-Za-z](?![A-Za-z]))"
# What makes another number of the one before it: a power, a factorial, a variable, a function, more digits (as in
# "33.(3)" and "70°30'"), an operation.
_CHANGED_BEHIND = re.compile(
    rf"[)}}\]]*\s*(?:!|\^|\*\*|(?:[-+*×÷·/]|\\times|\\cdot|\\div|\\pm|±){_OPERAND})|[_'.,][0-9]|:(?!00)[0-9]|[²³⁰¹⁴-⁹]|"
    r"[xyznkKMB](?![A-Za-z])|\.?\([0-9]|\.?\\(?:overline|bar|dot)(?![a-z])|° ?[0-9]|"
    r"\s*(?:π|√|\\pi|\\(?:sqrt|log|ln|sin|cos|tan)(?![a-z]))|\s*(?:<|>|≤|≥|\\[lg]eq?(?![a-z]))\s*[0-9A-Za-z]|"
    r"\s*and\s+(?:a|one)\s+(?:half|third|quarter|fourth)(?![A-Za-z])"
)
_CHANGED_BEFORE = re.compile(
    r"(?:(?:\\(?:sqrt|log|ln|sin|cos|tan)|√)\s*[({]*|\\pm|±|(?<![A-Za-z])[A-Za-z]\s*[+*/^]|(?:\\pi|π)\s*/?|"
    r"(?<![A-Za-z<])[A-Za-z]\s*(?:<|>|≤|≥|\\[lg]eq?(?![a-z])))\s*$"
)
_OPERATION = re.compile(r"[)}\]\s]*(?:[-+*×÷·/xX]|\\times|\\cdot|\\div)[({\[\s]*")  # between two numbers
_POWER_OF_TEN = re.compile(
    r"(?<=[0-9])\s*(?:\\times|\\cdot|[×·*x])\s*10\s*(?:\^|\*\*)\s*(?:\{([+-]?[0-9]{1,3})\}|([+-]?[0-9]{1,3}))"
)
_VARIABLE = re.compile(r"(?<![A-Za-z'])[A-Za-z]\s*$")
_OTHER_VALUE = re.compile(
    r"\s*(?:%|\\%)?\s*(?:[,;&|/-]|(?:,\s*)?(?:or|and|to)\b)?\s*|"
    r"(?:\s*[A-Za-z%]+){1,3},?\s+or(?:\s+[A-Za-z]+)?\s*"
)
_SECOND_UNIT = re.compile(  # between the numbers of "2 hours 30 minutes"
    r"\s*(?:(?:dollar|hour|hr|h|minute|min|day|week|month|year|pound|lb|yard)s?|feet|foot|ft)(?:,|\s+and)?\s*"
)


def load_rows(split: str, data_file: str | None = None) -> Dataset:
    """GSM8K from the hub, or every row of `data_file`, which has the same columns (`data.read_problems`)."""
    hub = ("openai/gsm8k", "main")
    source, rows = read_problems(split, data_file, hub, hub, COLUMNS)
    return task_rows(source, rows, _task_row, NUMBER)


def _task_row(row: dict[str, Any]) -> dict[str, Any]:
    question = text_in(row, "question")
    solution, mark, gold = text_in(row, "answer").rpartition("####")
    value = gold_number(gold)
    if not mark or value is None:
        raise ValueError(f"answer must end with '#### number', got {gold[-80:]!r}")
    solution = re.sub(r"<<.*?>>", "", solution).strip()  # without the calculator's annotations
    return problem(question, INSTRUCTIONS, ANSWER, value, solution=solution)


def gold_number(text: str) -> float | None:
    """The number that a text is, if it has nothing else but a dollar or percent sign. None for "5 or 6", "x - 3",
    "18 eggs", and for a comma that does not separate thousands, as in "3,14"."""
    number = _NUMBER.fullmatch(_plain(text).strip().removesuffix(".").removesuffix("%").removesuffix("\\"))
    if not number or _NO_THOUSANDS.search(_join_groups(text)):
        return None
    return _value(number)


def extract(text: str) -> float | None:
    """The number that a completion gives as its answer, or None."""
    return number_in(final_answer(text) or "")


def number_in(text: str) -> float | None:
    r"""The number in an answer: "$1,234.50", "-3", "2 1/2", "\frac{3}{4}", "5\text{ km}", "60\%" (60), "9+9=18".

    After the last equals sign, the first number counts if no letter precedes it ("18 eggs for 2 days"), else the last
    one ("in 2 days she sells 18"). None if there is no finite number, if it is part of an expression ("3^2", "4!",
    "2x", "3 + 4", "x - 3"), or if the answer gives other numbers to choose from ("5 or 6", "5-6").
    """
    if len(text) <= MAX_MARKUP:
        text = unwrap(text)
    text = _plain(_read_commands(text))
    while "=" in text and not re.search("[0-9]", text.rpartition("=")[2]):  # 18 = x
        text = text.rpartition("=")[0]
    text = text.rpartition("=")[2]
    numbers = list(_NUMBER.finditer(text))
    if not numbers:
        return None
    index = 0
    if re.search(r"[A-Za-z]", text[: numbers[0].start()]):
        index = len(numbers) - 1
    number = numbers[index]
    if _is_part_of_expression(number, text):
        return None
    for first, second in pairwise(numbers[max(0, index - 1) : index + 2]):
        if _OPERATION.fullmatch(text, first.end(), second.start()):
            return None  # an expression
        if _SECOND_UNIT.fullmatch(text, first.end(), second.start()):
            return None  # a quantity in two units
        if _value(first) != _value(second) and _OTHER_VALUE.fullmatch(text, first.end(), second.start()):
            return None  # another number to choose from

    return _scale_number(number, text)


def _is_part_of_expression(number: re.Match[str], text: str) -> bool:
    """Whether the number is a part of an expression whose value is another one."""
    before = text[max(0, number.start() - 20) : number.start()]
    if number["sign"] and _VARIABLE.search(before):
        return True
    if _is_in_fraction(text, number.start()):
        return True
    return bool(_CHANGED_BEHIND.match(text, number.end()) or _CHANGED_BEFORE.search(before))


def _is_in_fraction(text: str, position: int) -> bool:
    r"""Whether a position lies in a fraction that is no number, such as \frac{3 + 5}{2}."""
    fractions = list(_OPEN_FRACTION.finditer(text, 0, position))
    if not fractions:
        return False
    depth = 0
    closed_parts = 0
    for character in text[fractions[-1].end() : position]:
        if character == "{":
            depth += 1
        elif character == "}":
            depth -= 1
            if depth == 0:
                closed_parts += 1
        elif depth == 0 and not character.isspace():
            return False  # the fraction is over; its second part may be one character without braces
    return closed_parts < 2


def _plain(text: str) -> str:
    """The text with one form of fractions and minus signs, and without currency signs and thousands separators."""
    text = _join_groups(_PUNCTUATION.sub(" : ", text))
    text = re.sub(r"\\?\$|[€£¥]", "", text).translate(FRACTION_SIGNS)
    text = _THOUSANDS.sub("", _POWER_OF_TEN.sub(r"e\1\2", text))
    return _FRAC.sub(lambda parts: f" {parts[1] or parts[2]}/{parts[3] or parts[4]}", text)


def _read_commands(text: str) -> str:
    r"""The text with one sign for degrees, and with the content of \text{} and similar commands in their place."""
    return _COMMAND.sub(lambda command: _PER.sub(" per ", command[1]), DEGREES.sub("°", text))


def _join_groups(text: str) -> str:
    """The text with plain characters, and with "70 000", "70'000" and "1,00,000" in one piece."""
    text = plain_characters(text)
    for groups in (_SPACED_THOUSANDS, _LAKHS):
        text = groups.sub(lambda number: re.sub("[ ~',]", "", number[0]), text)
    return text


def _value(match: re.Match[str]) -> float | None:
    """The number of a match of `_NUMBER`, or None if it is not finite."""
    value = float(match["top"])
    if match["bottom"]:
        bottom = float(match["bottom"])
        value = value / bottom if bottom else math.inf
    value += float(match["whole"] or 0)
    if not math.isfinite(value):
        return None
    return -value if match["sign"] else value


def _scale_number(number: re.Match[str], text: str) -> float | None:
    """The number of a match of `_NUMBER` in a text, with the "million" that follows it."""
    value = _value(number)
    scale = _SCALE.match(text, number.end())
    if value is None or scale is None:
        return value
    return value * _SCALES[scale[1].lower()]


def score(text: str, row: dict[str, Any]) -> dict[str, float]:
    return {"accuracy": float(_is_right(extract(text), row["ground_truth"]))}


def _is_right(answer: float | None, gold: float) -> bool:
    if not isinstance(gold, int | float) or isinstance(gold, bool) or not math.isfinite(gold):
        raise ValueError(f"the ground truth must be a number, got {gold!r}")
    return answer is not None and math.isclose(answer, gold, rel_tol=1e-9, abs_tol=1e-9)


def tag_count_reward(completions: Sequence[Completion], **columns: Any) -> list[float]:
    """0.125 per tag (of four) that occurs exactly once, minus 0.001 per character after the answer; at least 0."""

    def reward(text: str) -> float:
        trailing = ""
        if "</answer>" in text:
            trailing = text.rpartition("</answer>")[2].strip()
        tags = sum(text.count(tag) == 1 for tag in TAGS)
        return max(0.0, 0.125 * tags - 0.001 * len(trailing))

    return reward_each(completions, reward)


def soft_format_reward(completions: Sequence[Completion], **columns: Any) -> list[float]:
    """0.5 if the completion starts with a reasoning block followed by an answer block."""

    def reward(text: str) -> float:
        return 0.5 if _SOFT_FORMAT.match(text) else 0.0

    return reward_each(completions, reward)


def strict_format_reward(completions: Sequence[Completion], **columns: Any) -> list[float]:
    """0.5 if the completion is exactly these two blocks, with each tag on its own line."""

    def reward(text: str) -> float:
        return 0.5 if _STRICT_FORMAT.fullmatch(text) else 0.0

    return reward_each(completions, reward)


def integer_reward(completions: Sequence[Completion], **columns: Any) -> list[float]:
    """0.5 if the answer is an integer and nothing else."""

    def reward(text: str) -> float:
        answer = _join_groups(final_answer(text) or "").strip("$ ")
        return 0.5 if _INTEGER.fullmatch(answer) else 0.0

    return reward_each(completions, reward)


def correct_reward(completions: Sequence[Completion], ground_truth: Sequence[float], **columns: Any) -> list[float]:
    """2.0 if the answer is the ground truth."""

    def reward(text: str, gold: float) -> float:
        return 2.0 * _is_right(extract(text), gold)

    return reward_each(completions, reward, ground_truth)


REWARDS = [tag_count_reward, soft_format_reward, strict_format_reward, integer_reward, correct_reward]


def demonstrate(row: dict[str, Any]) -> str:
    """The solution that comes with a training row."""
    return format_completion(row["solution"], rf"\boxed{{{row['ground_truth']:.15g}}}")


def last_number(text: str) -> float | None:
    """The last number of a completion, such as "1.5 million"; a new "Question:" and what follows it do not count."""
    text = _plain(_read_commands(text[-MAX_TEXT:].partition("Question:")[0]))
    numbers = list(_NUMBER.finditer(text))
    return _scale_number(numbers[-1], text) if numbers else None


def last_number_reward(completions: Sequence[Completion], ground_truth: Sequence[float], **columns: Any) -> list[float]:
    """2.0 if the last number is the ground truth."""

    def reward(text: str, gold: float) -> float:
        return 2.0 * _is_right(last_number(text), gold)

    return reward_each(completions, reward, ground_truth)


def _plain_solution(row: dict[str, Any]) -> str:
    return f"{row['solution']}\nThe answer is {row['ground_truth']:.15g}."


def _score_last_number(text: str, row: dict[str, Any]) -> dict[str, float]:
    return {"accuracy": float(_is_right(last_number(text), row["ground_truth"]))}


PROTOCOLS: dict[str, dict[str, Any]] = {
    "llada": {
        "QUESTION": "Question: {question}\nLet's think step by step.\nAnswer:",
        "SHOTS": 4,
        "demonstrate": _plain_solution,
        "extract": last_number,
        "score": _score_last_number,
        "REWARDS": [last_number_reward],
    }
}
