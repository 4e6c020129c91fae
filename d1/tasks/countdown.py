"""Countdown: make the target from three numbers, each used exactly once, with + - * / and parentheses."""

from __future__ import annotations

import ast
import operator
import re
from collections.abc import Callable, Mapping, Sequence
from fractions import Fraction
from itertools import permutations
from typing import Any

from datasets import Dataset

from d1.tasks import Completion, ask, final_answer, format_completion, judged
from d1.tasks.data import JSON, file_of, hold_out, read_file, read_hub, task_rows

INSTRUCTIONS = (
    "Write an expression that equals the target. Use each of the numbers exactly once, and only +, -, *, / and "
    "parentheses."
)
ANSWER = r"the expression alone as \boxed{expression}"
MAX_EXPRESSION = 200  # characters
HUB = "Jiayi-Pan/Countdown-Tasks-3to4"
TEST_COLUMNS, HUB_COLUMNS = ("input", "output"), ("nums", "target")

SIGNS: dict[type[ast.AST], Callable[..., Any]] = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.Div: operator.truediv,
    ast.USub: operator.neg,
}
UNCOUNTABLE = (SyntaxError, ValueError, ArithmeticError, TypeError, RecursionError, MemoryError)
_LATEX = [
    (re.compile(r"\\(?:times|cdot|ast)(?![A-Za-z])|[×·⋅∗]"), "*"),
    (re.compile(r"\\div(?![A-Za-z])|÷"), "/"),
    (re.compile(r"[−–]"), "-"),
    (re.compile(r"\\(?:left|right)(?![A-Za-z])|\\[!,;: ()\[\]]|\$|\\(?:quad|displaystyle)(?![A-Za-z])"), " "),
    (re.compile(r"\\[dt]?frac\s*\{([^{}]*)\}\s*\{([^{}]*)\}"), r"((\1)/(\2))"),
]
_ALLOWED = re.compile(r"[0-9+\-*/() \t\n]+")


def load_rows(split: str, data_file: str | None = None) -> Dataset:
    """Countdown problems in d1's test schema (`input` "30,100,93", `output` "23") or the hub's (`nums`, `target`).

    A `data_file` is taken whole, whatever the split. Without one, the test split is `dataset/countdown_test.jsonl`;
    training and validation come from the hub's `Jiayi-Pan/Countdown-Tasks-3to4`: its problems with three numbers in a
    seed-42 shuffle, the last 500 held out as validation, less those that are in the test file.
    """
    path = file_of(split, data_file, "countdown_test.jsonl")
    problems = _problems(path, read_file(path, TEST_COLUMNS, HUB_COLUMNS))
    if not data_file and split != "test":
        test = {(*sorted(numbers), target) for numbers, target in problems}
        rows = read_hub(HUB, None, "train", HUB_COLUMNS)
        rows = hold_out(rows.filter(lambda row: len(row["nums"]) == 3), split)
        problems = [(nums, target) for nums, target in _problems(HUB, rows) if (*sorted(nums), target) not in test]
    return task_rows([_task_row(numbers, target) for numbers, target in problems], JSON)


def _problems(source: str, rows: Dataset) -> list[tuple[list[int], int]]:
    names = TEST_COLUMNS if "input" in rows.column_names else HUB_COLUMNS
    problems = []
    for i, (numbers, target) in enumerate(zip(rows[names[0]], rows[names[1]], strict=True), start=1):
        try:
            numbers = numbers.split(",") if isinstance(numbers, str) else numbers
            problems.append(([int(n) for n in numbers], int(target)))
        except (ValueError, TypeError):
            raise ValueError(
                f"{source}, row {i}: {names[0]} and {names[1]} must be integers, got {numbers!r}, {target!r}"
            ) from None
    return problems


def _task_row(numbers: list[int], target: int) -> dict[str, Any]:
    question = f"Numbers: {numbers}\nTarget: {target}"
    return {
        "prompt": ask(question, INSTRUCTIONS, ANSWER),
        "question": question,
        "ground_truth": [numbers, target],
    }


def extract(text: str) -> str | None:
    r"""The answer's expression in plain signs, or None; LaTeX signs are translated and a final "= 22" is dropped."""
    expression = final_answer(text)
    if expression is None:
        return None
    expression = expression[: 4 * MAX_EXPRESSION]
    for pattern, plain in _LATEX:
        expression = pattern.sub(plain, expression)
    return expression.partition("=")[0].strip() or None


def calculate(expression: str, signs: Mapping[type[ast.AST], Callable[..., Any]], number: Callable[[Any], Any]) -> Any:
    """The value of an arithmetic expression. Nothing is executed: the syntax tree is walked.

    Args:
        signs: the operators that it may have.
        number: makes a value of each of its numbers.

    Raises:
        One of `UNCOUNTABLE`: it is none, or has no value.
    """

    def value(node: ast.expr) -> Any:
        match node:
            case ast.BinOp(op=op, left=left, right=right) if type(op) in signs:
                return signs[type(op)](value(left), value(right))
            case ast.UnaryOp(op=op, operand=operand) if type(op) in signs:
                return signs[type(op)](value(operand))
            case ast.Constant(value=int() | float() as constant):
                return number(constant)
        raise ValueError(f"{type(node).__name__} is not part of the game")

    return value(ast.parse(expression.strip(), mode="eval").body)


def evaluate(expression: str, numbers: Sequence[int]) -> Fraction | None:
    """The exact value of `expression`, or None unless it is + - * / and parentheses on `numbers`, each exactly once.

    An expression longer than `MAX_EXPRESSION` characters is refused, so no number can grow beyond a few hundred digits.
    """
    if len(expression) > MAX_EXPRESSION or not _ALLOWED.fullmatch(expression):
        return None
    if sorted(map(int, re.findall("[0-9]+", expression))) != sorted(numbers):
        return None
    try:
        return calculate(expression, SIGNS, Fraction)
    except UNCOUNTABLE:
        return None


def score(text: str, row: dict[str, Any]) -> dict[str, float]:
    return {"accuracy": float(_is_correct(extract(text), row["ground_truth"]))}


def _is_correct(expression: str | None, ground_truth: Any) -> bool:
    match ground_truth:
        case [[*numbers], int(target)] if all(isinstance(n, int) for n in numbers):
            return expression is not None and evaluate(expression, numbers) == target
    raise ValueError(f"the ground truth must be [[numbers], target], got {ground_truth!r}")


def expression_reward(completions: Sequence[Completion], **columns: Any) -> list[float]:
    """1.0 for a correct expression, 0.1 for another answer, 0 for none (d1's Countdown reward)."""

    def reward(text: str, truth: Any) -> float:
        expression = extract(text)
        return 0.0 if expression is None else 1.0 if _is_correct(expression, truth) else 0.1

    return judged(completions, columns, reward)


REWARDS = [expression_reward]


def demonstrate(row: dict[str, Any]) -> str:
    """A worked solution, found by trying every expression."""
    numbers, target = row["ground_truth"]
    found = _solve([(Fraction(n), str(n), []) for n in numbers], Fraction(target))
    if found is None:
        raise ValueError(f"no expression of {numbers} equals {target}")
    expression, steps = found
    return format_completion("\n".join(steps), rf"\boxed{{{expression}}}")


def _solve(parts: list[tuple[Fraction, str, list[str]]], target: Fraction) -> tuple[str, list[str]] | None:
    """An expression equal to `target`, and its steps, from parts (value, expression, steps so far), each used once."""
    if len(parts) == 1:
        value, expression, steps = parts[0]
        return (expression, steps) if value == target else None
    for i, j in permutations(range(len(parts)), 2):
        (a, left, left_steps), (b, right, right_steps) = parts[i], parts[j]
        rest = [part for k, part in enumerate(parts) if k not in (i, j)]
        for sign, apply in zip("+-*/" if b else "+-*", SIGNS.values(), strict=False):
            step = f"{a} {sign} {b if b >= 0 else f'({b})'} = {(value := apply(a, b))}"
            part = (value, f"({left} {sign} {right})", [*left_steps, *right_steps, step])
            if found := _solve([*rest, part], target):
                return found
    return None
