"""Python functions, judged by tests in a sandbox: HumanEval, MBPP, and rows with pytest functions in KodCode's manner.

A file's columns say which: `prompt, test, entry_point` (HumanEval), `test_list` with `text` or `prompt` (MBPP), or
`question, test` (KodCode), whose tests import from `solution`. What can pass is called a case: a top-level statement
with an assert, such a statement of HumanEval's `check`, or a test function. Rows whose tests cannot run in the sandbox
are left out and counted. docs/code.md says which those are, and what the sandbox keeps out.
"""

from __future__ import annotations

import ast
import builtins
import logging
import re
import sys
from collections.abc import Callable, Sequence
from itertools import count
from typing import Any

from datasets import Dataset

from d1.sandbox import DEFAULT, WORKERS, Cases, Limits, shares_passed, working_python
from d1.tasks import MAX_TEXT, Completion, answer_block, ask, format_completion, text_of
from d1.tasks.data import JSON, check_split, read_problems, task_rows

logger = logging.getLogger(__name__)

Read = Callable[[str, Any], tuple[str | None, Cases]]  # (completion, ground truth) -> its program and the tests

INSTRUCTIONS = "Write the Python program that is asked for."
ANSWER = "the whole program in a ```python block"
HUMANEVAL, MBPP, FIRST_MBPP = ("prompt", "test", "entry_point"), ("prompt", "test_list"), ("text", "test_list")
KODCODE = ("question", "test")
TRAIN, TEST = ("KodCode/KodCode-V1", None), ("openai/openai_humaneval", None)
JUDGED = f"tests in a bubblewrap sandbox, with limits per program: {DEFAULT}"  # for the model card
CONCURRENT = WORKERS  # calls of `score` that evaluation may make at a time

_FENCE = re.compile(r"```(?:python|py)?[ \t]*\n(.*?)(?:```|\Z)", re.DOTALL)


def load_rows(split: str, data_file: str | None = None) -> Dataset:
    """Rows of `data_file`; else KodCode-V1 for training and validation, HumanEval for the test, from the hub.

    Raises:
        SandboxError: there is no sandbox here.
        ValueError: the file has other columns, or no row can be used.
    """
    check_split(split)
    working_python()
    source, rows = read_problems(split, data_file, TRAIN, TEST, HUMANEVAL, MBPP, FIRST_MBPP, KODCODE)
    kept, left_out = [], []
    for number, row in enumerate(rows, start=1):
        try:
            kept.append(_task_row(row))
        except ValueError as error:
            left_out.append(f"row {number}, {error}")
    if not kept:
        raise ValueError(f"{source}: no row can be used: {left_out[0]}")
    if left_out:
        logger.warning("%s: %d of %d rows left out, first %s", source, len(left_out), len(rows), left_out[0])
    return task_rows(source, kept, dict, JSON)


def _task_row(row: dict[str, Any]) -> dict[str, Any]:
    made = (_humaneval if "entry_point" in row else _mbpp if "test_list" in row else _kodcode)(row)
    question, prefix, tests, solution = made
    truth = {"prefix": prefix, "source": tests.source, "names": list(tests.names), "count": tests.count}
    return {
        "prompt": ask(question, INSTRUCTIONS, ANSWER),
        "question": question,
        "ground_truth": truth | {"setup": tests.setup},
        "solution": str(solution or ""),
    }


Made = tuple[str, str, Cases, Any]  # question, what goes before the program, tests, solution


def _humaneval(row: dict[str, Any]) -> Made:
    """The prompt's own helpers and imports are there for the tests, too, so that no program replaces them."""
    prompt, entry = row["prompt"], row["entry_point"]
    source, _, cases = with_cases(row["test"], within="check")
    tests = Cases(f"{source}\ncheck({entry})", (entry,), cases, prompt)
    parsed(prompt, "prompt")
    return f"Complete this function:\n\n{prompt.strip()}", prompt + "\n", tests, row.get("canonical_solution")


def _mbpp(row: dict[str, Any]) -> Made:
    """The first test is shown, because it has the function's name and the form of its arguments."""
    listed = row["test_list"]
    if not isinstance(listed, list) or not all(isinstance(test, str) for test in listed) or not listed:
        raise ValueError(f"test_list must be a list of tests, got {listed!r:.80}")
    setup = "\n".join([str(row.get("test_setup_code") or ""), *(row.get("test_imports") or ())])
    source, _, cases = with_cases("\n".join(listed))
    free = free_names(f"{setup}\n{source}")
    modules = sorted(free & sys.stdlib_module_names)
    setup = "\n".join([*(f"import {name}" for name in modules), setup])
    question = f"{row.get('text') or row['prompt']}\n\nOne of the tests:\n{listed[0]}"
    return question, "", Cases(source, tuple(sorted(free - {*modules})), cases, setup), row.get("code")


def _kodcode(row: dict[str, Any]) -> Made:
    source, names, cases = with_cases(row["test"])
    wanted = [info["function_declaration"] for info in row.get("test_info") or ()] or names
    question = f"{row['question'].strip()}\n\nName in the program: {', '.join(map(str, wanted))}"
    return question, "", Cases(source, names, cases), row.get("solution")


def parsed(source: Any, what: str = "test") -> ast.Module:
    try:
        return ast.parse(source)
    except (SyntaxError, ValueError, TypeError, RecursionError, MemoryError) as error:
        raise ValueError(f"{what} is no Python: {error}") from None


def with_cases(source: str, within: str = "") -> tuple[str, tuple[str, ...], int]:
    """Cases as `d1.sandbox.Cases` wants them: the source with its cases marked, the names that it imports from
    `solution`, and the number of cases.

    Args:
        within: a function whose statements are cases, and not those around it.

    Raises:
        ValueError: there is no case, or one that cannot run in the sandbox.
    """
    numbers, names = count(), list[str]()
    body, last = list[ast.stmt](), list[ast.stmt]()

    def case(statement: ast.stmt) -> ast.stmt:
        call = ast.Call(ast.Name("__case__", ast.Load()), [ast.Constant(next(numbers))], [])
        return ast.With([ast.withitem(call)], [statement])

    def marked(statement: ast.stmt) -> ast.stmt:
        inner = isinstance(statement, ast.FunctionDef | ast.ClassDef)
        asserts = any(isinstance(node, ast.Assert) for node in ast.walk(statement))
        return case(statement) if asserts and not inner else statement

    for node in parsed(source).body:
        if isinstance(node, ast.FunctionDef) and node.name == within:
            node.body = [marked(statement) for statement in node.body]
        elif isinstance(node, ast.FunctionDef) and node.name.startswith("test"):
            if node.args.args or node.decorator_list:
                raise ValueError(f"{node.name} takes parameters or has a decorator")
            last.append(case(ast.Expr(ast.Call(ast.Name(node.name, ast.Load()), [], []))))
        elif isinstance(node, ast.ClassDef) and node.name.startswith("Test"):
            raise ValueError(f"{node.name}: tests in classes do not run here")
        elif isinstance(node, ast.ImportFrom) and node.module == "solution":
            names += [alias.name for alias in node.names]
            body += [ast.parse(f"{alias.asname} = {alias.name}").body[0] for alias in node.names if alias.asname]
            continue
        elif isinstance(node, ast.Import) and [alias.name for alias in node.names] == ["solution"]:
            names.append("solution")
            continue
        elif isinstance(node, ast.Import | ast.ImportFrom):
            modules = [alias.name for alias in node.names] if isinstance(node, ast.Import) else [str(node.module)]
            if foreign := {name.partition(".")[0] for name in modules} - sys.stdlib_module_names:
                raise ValueError(f"the tests import {min(foreign)}, which the sandbox does not have")
        body.append(node if within else marked(node))
    tree = ast.fix_missing_locations(ast.Module([*body, *last], []))
    if not (cases := next(numbers)):
        raise ValueError("there is no assert and no test function")
    return ast.unparse(tree), tuple(dict.fromkeys(names)), cases


def free_names(source: str) -> set[str]:
    """Names that a source reads and nothing in it defines; not those of Python."""
    nodes = list(ast.walk(parsed(source)))
    read = {node.id for node in nodes if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Load)}
    made = {node.id for node in nodes if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store)}
    made |= {node.name for node in nodes if isinstance(node, ast.FunctionDef | ast.ClassDef)}
    made |= {node.arg for node in nodes if isinstance(node, ast.arg)}
    aliases = (node for node in nodes if isinstance(node, ast.alias))
    made |= {(alias.asname or alias.name).partition(".")[0] for alias in aliases}
    return read - made - {*dir(builtins), "__case__"}


def extract(text: str) -> str | None:
    """The program of a completion: the last fenced block of its answer, else of the completion, else the answer."""
    answer = answer_block(text)
    blocks = _FENCE.findall(answer or "") or _FENCE.findall(text[-MAX_TEXT:])
    return (blocks[-1] if blocks else answer) or None


def demonstrate(row: dict[str, Any]) -> str:
    """The solution that comes with a row."""
    return format_completion("", f"```python\n{row['ground_truth']['prefix']}{row['solution']}\n```")


def read_program(text: str, truth: Any) -> tuple[str | None, Cases]:
    """The program of a completion and the tests of its row."""
    try:
        tests = Cases(truth["source"], tuple(truth["names"]), truth["count"], truth["setup"])
        prefix = truth["prefix"]
    except (TypeError, KeyError):
        raise ValueError(f"the ground truth must be tests of this task, got {truth!r:.80}") from None
    program = extract(text)
    return program and prefix + program, tests


def judged_by(read: Read, limits: Limits = DEFAULT) -> tuple[list[Callable[..., list[float]]], Callable[..., Any]]:
    """REWARDS and `score` of a task whose answers are programs: `read` takes a completion and the ground truth."""

    def shares(completions: Sequence[Completion], ground_truth: Sequence[Any]) -> list[float]:
        pairs = [read(text_of(c), truth) for c, truth in zip(completions, ground_truth, strict=True)]
        return shares_passed([program for program, _ in pairs], [tests for _, tests in pairs], limits)

    def tests_reward(completions: Sequence[Completion], ground_truth: Sequence[Any], **columns: Any) -> list[float]:
        """The share of cases that pass."""
        return shares(completions, ground_truth)

    def solved_reward(completions: Sequence[Completion], ground_truth: Sequence[Any], **columns: Any) -> list[float]:
        """1.0 if all cases pass."""
        return [float(share == 1) for share in shares(completions, ground_truth)]

    def score(text: str, row: dict[str, Any]) -> dict[str, float]:
        (share,) = shares([text], [row["ground_truth"]])
        return {"accuracy": float(share == 1), "tests": share}

    return [tests_reward, solved_reward], score


REWARDS, score = judged_by(read_program)
