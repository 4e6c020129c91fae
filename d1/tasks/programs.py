"""Programs by example, a coding task of pocket size: find the expression for f(x) from two examples.

f maps a text of five letters to another one, each letter of which is one of x: `x[3] + x[0] + x[0] + x[2] + x[1]`. An
answer may be any expression: it runs in the sandbox as the body of f, on both examples and on "vwxyz", which is not
shown. Rows are `{"input": "abcde,edcba", "program": "x[3] + x[0] + x[0] + x[2] + x[1]"}`.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from itertools import product
from typing import Any

from datasets import Dataset

from d1.sandbox import Cases, working_python
from d1.tasks import answer_block, format_completion, problem
from d1.tasks.code import CONCURRENT, judged_by
from d1.tasks.data import JSON, file_of, read_file, task_rows

__all__ = ["CONCURRENT", "REWARDS", "demonstrate", "extract", "load_rows", "score"]

INSTRUCTIONS = "Find the function f from two examples."
ANSWER = "the expression in x alone"
COLUMNS = ("input", "program")
INPUTS = ("abcde", "edcba")  # of the shipped examples
HIDDEN = "vwxyz"  # the input on which an answer is judged, too
LETTERS = len(HIDDEN)  # letters of x, and of f(x)

_CODE = re.compile(r"(?:```(?:python|py)?\s*\n|`)([^`]+)(?:```|`)")

Function = tuple[int, ...]  # the index in x of each letter of f(x)


def functions() -> list[Function]:
    """All functions of the task."""
    return list(product(range(LETTERS), repeat=LETTERS))


def program_of(function: Function) -> str:
    return " + ".join(f"x[{index}]" for index in function)


def value_at(function: Function, x: str) -> str:
    return "".join(x[index] for index in function)


def question_of(inputs: Sequence[str], function: Function) -> str:
    """The question that these examples make."""
    return "\n".join(f"f({x!r}) = {value_at(function, x)!r}" for x in inputs)


def load_rows(split: str, data_file: str | None = None) -> Dataset:
    """Problems of `dataset/programs_{split}.jsonl`, whose splits share no function, or of `data_file`.

    Raises:
        SandboxError: there is no sandbox here.
    """
    path = file_of(split, data_file, "programs_{}.jsonl")
    working_python()
    return task_rows(path, read_file(path, COLUMNS), _task_row, JSON)


def read_row(row: dict[str, Any]) -> tuple[list[str], Function]:
    """The inputs of a row's examples, and its function."""
    inputs = str(row["input"]).split(",")
    if len(inputs) != 2 or not all(sorted(x) == sorted(INPUTS[0]) for x in inputs):
        raise ValueError(f"input must be two orders of {INPUTS[0]}, as in abcde,edcba, got {row['input']!r:.80}")
    if not re.fullmatch(r"x\[[0-4]\]( \+ x\[[0-4]\]){4}", str(row["program"])):
        raise ValueError(f"program must be as in x[3] + x[0] + x[0] + x[2] + x[1], got {row['program']!r:.80}")
    return inputs, tuple(map(int, re.findall(r"\d", row["program"])))


def _task_row(row: dict[str, Any]) -> dict[str, Any]:
    inputs, function = read_row(row)
    truth = [[x, value_at(function, x)] for x in (*inputs, HIDDEN)]
    return problem(question_of(inputs, function), INSTRUCTIONS, ANSWER, truth, solution=row["program"])


def extract(text: str) -> str | None:
    """The expression in a completion's last answer block, or None; it may stand in backticks."""
    answer = answer_block(text) or ""
    code = _CODE.fullmatch(answer)
    if code:
        answer = code[1].strip()
    return answer or None


def demonstrate(row: dict[str, Any]) -> str:
    """The expression that comes with a row."""
    return format_completion("", row["solution"])


def read_program(text: str, examples: Any) -> tuple[str | None, Cases]:
    """A completion's answer as the function f; a case per example, and one per letter of the hidden one."""
    try:
        *shown_examples, (hidden_x, hidden_y) = examples
        checks = [f"f({x!r}) == {y!r}" for x, y in shown_examples]
        checks += [f"f({hidden_x!r})[{index}] == {letter!r}" for index, letter in enumerate(hidden_y)]
    except (TypeError, ValueError):
        raise ValueError(f"the ground truth must be pairs of texts, got {examples!r:.80}") from None
    cases = [f"with __case__({number}):\n    assert {check}" for number, check in enumerate(checks)]
    tests = Cases("\n".join(cases), ("f",), len(cases))
    answer = extract(text)
    if not answer:
        return None, tests
    return f"def f(x):\n    return {answer}", tests


REWARDS, score = judged_by(read_program)
