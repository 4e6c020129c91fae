"""Countdown: make the target from three numbers, each used exactly once, with + - * / and parentheses."""

from __future__ import annotations

import ast
import operator
import re
from collections.abc import Callable, Sequence
from fractions import Fraction
from typing import Any

from datasets import Dataset

from d1.tasks import Completion, final_answer, problem, reward_each
from d1.tasks.data import JSON, file_of, hold_out, read_file, read_hub, task_rows
from d1.tasks.latex import strip_open_box

INSTRUCTIONS = (
    "Write an expression that equals the target. Use each of the numbers exactly once, and only +, -, *, / and "
    "parentheses."
)
ANSWER = r"the expression alone as \boxed{expression}"
MAX_EXPRESSION = 200  # characters
HUB = "Jiayi-Pan/Countdown-Tasks-3to4"
TEST_COLUMNS = ("input", "output")
HUB_COLUMNS = ("nums", "target")

_SIGNS: dict[type[ast.AST], Callable[..., Fraction]] = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.Div: operator.truediv,
    ast.USub: operator.neg,
}
_LATEX = [
    (re.compile(r"^\s*```[a-z]*\s*\n([^`]+)```\s*$"), r"\1"),  # a block of code
    (re.compile(r"^\s*(\*\*|`{1,3})(?=[^*`])(.+)(?<=[^*`])\1\s*$"), r"\2"),  # bold, code
    (re.compile(r"\\(?:times|cdot|ast)(?![A-Za-z])|[×·⋅∗]"), "*"),
    (re.compile(r"\\div(?![A-Za-z])|÷"), "/"),
    (re.compile(r"[‐‑‒–—―−]"), "-"),
    (re.compile(r"\\(?:left|right)(?![A-Za-z])|\\[!,;: ()\[\]]|\$|\\(?:quad|displaystyle)(?![A-Za-z])"), " "),
    (re.compile(r"[^\S\t\n\r ]"), " "),  # no-break and thin spaces
    (re.compile(r"\\[dt]?frac\s*\{([^{}]*)\}\s*\{([^{}]*)\}"), r"((\1)/(\2))"),
]
_ALLOWED = re.compile(r"[0-9+\-*/() \t\n]+")


def load_rows(split: str, data_file: str | None = None) -> Dataset:
    """Countdown problems in d1's test schema (`input` "30,100,93", `output` "23") or the hub's (`nums`, `target`).

    A `data_file` is used as a whole, for any split. Without one, the test split is `dataset/countdown_test.jsonl`;
    training and validation come from the hub's `Jiayi-Pan/Countdown-Tasks-3to4`: its problems with three numbers are
    shuffled with seed 42, the last 500 are the validation split, and problems of the test file are removed.
    """
    path = file_of(split, data_file, "countdown_test.jsonl")
    rows = task_rows(path, read_file(path, TEST_COLUMNS, HUB_COLUMNS), _task_row, JSON)
    if data_file or split == "test":
        return rows
    hub = read_hub(HUB, None, "train", HUB_COLUMNS).filter(lambda row: len(row["nums"]) == 3)
    test_problems = {(*sorted(numbers), target) for numbers, target in rows["ground_truth"]}
    rows = task_rows(HUB, hold_out(hub, split), _task_row, JSON)
    indices = []
    for index, (numbers, target) in enumerate(rows["ground_truth"]):
        if (*sorted(numbers), target) not in test_problems:
            indices.append(index)
    return rows.select(indices)


def _task_row(row: dict[str, Any]) -> dict[str, Any]:
    numbers_column, target_column = TEST_COLUMNS if row.keys() >= set(TEST_COLUMNS) else HUB_COLUMNS
    numbers_cell, target_cell = row[numbers_column], row[target_column]
    try:
        parts = numbers_cell.split(",") if isinstance(numbers_cell, str) else numbers_cell
        numbers = [read_integer(part) for part in parts]
        target = read_integer(target_cell)
    except (ValueError, TypeError):
        raise ValueError(
            f"{numbers_column} and {target_column} must be integers, got {numbers_cell!r}, {target_cell!r}"
        ) from None
    if not numbers or min(numbers) < 0:
        raise ValueError(
            f"{numbers_column} must be numbers of 0 or more, which an expression can use, got {numbers_cell!r}"
        )
    question = f"Numbers: {numbers}\nTarget: {target}"
    return problem(question, INSTRUCTIONS, ANSWER, [numbers, target])


def read_integer(value: Any) -> int:
    """An integer, or a text or float that is one. Raises ValueError or TypeError for anything else."""
    if isinstance(value, bool) or (isinstance(value, float) and not value.is_integer()):
        raise ValueError
    return int(value)


def extract(text: str) -> str | None:
    r"""The answer's expression in plain signs, or None.

    LaTeX signs are translated. A final "= 22", and the beginning of a box that is cut off, are dropped.
    """
    expression = final_answer(text)
    if expression is None:
        return None
    expression = expression[: 4 * MAX_EXPRESSION]
    for pattern, plain in _LATEX:
        expression = pattern.sub(plain, expression)
    expression = expression.strip()
    without_box = strip_open_box(expression)
    if without_box != expression:
        expression = without_box.removesuffix(">")  # LLaDA wrote it in place of the brace
    return expression.partition("=")[0].strip().removesuffix(".").strip() or None


def evaluate(expression: str, numbers: Sequence[int]) -> Fraction | None:
    """The exact value of `expression`; None unless it is + - * / and parentheses on `numbers`, each used exactly once.

    Nothing is executed: the syntax tree is walked. An expression longer than `MAX_EXPRESSION` characters is refused, so
    no number can grow beyond a few hundred digits.
    """

    def value(node: ast.expr) -> Fraction:
        match node:
            case ast.BinOp(op=op, left=left, right=right) if type(op) in _SIGNS:
                return _SIGNS[type(op)](value(left), value(right))
            case ast.UnaryOp(op=op, operand=operand) if type(op) in _SIGNS:
                return _SIGNS[type(op)](value(operand))
            case ast.Constant(value=int() as constant):
                return Fraction(constant)
        raise ValueError(f"{type(node).__name__} is not part of the game")

    # Python's parser would read 1_7, ** and digits of other scripts, too: these characters alone reach it.
    if len(expression) > MAX_EXPRESSION or not _ALLOWED.fullmatch(expression):
        return None
    if sorted(map(int, re.findall("[0-9]+", expression))) != sorted(numbers):
        return None
    try:
        return value(ast.parse(expression.strip(), mode="eval").body)
    except (SyntaxError, ValueError, ArithmeticError, TypeError, RecursionError, MemoryError):
        return None


def score(text: str, row: dict[str, Any]) -> dict[str, float]:
    return {"accuracy": float(_is_correct(extract(text), row["ground_truth"]))}


def _is_correct(expression: str | None, ground_truth: Any) -> bool:
    match ground_truth:
        case [[*numbers], int(target)] if all(isinstance(n, int) for n in numbers):
            return expression is not None and evaluate(expression, numbers) == target
    raise ValueError(f"the ground truth must be [[numbers], target], got {ground_truth!r}")


def expression_reward(completions: Sequence[Completion], ground_truth: Sequence[Any], **columns: Any) -> list[float]:
    """1.0 for a correct expression, 0.1 for another answer, 0 for none (d1's Countdown reward)."""

    def reward(text: str, truth: Any) -> float:
        expression = extract(text)
        if expression is None:
            return 0.0
        return 1.0 if _is_correct(expression, truth) else 0.1

    return reward_each(completions, reward, ground_truth)


REWARDS = [expression_reward]
