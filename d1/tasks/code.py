"""Python functions, judged by tests in a sandbox: HumanEval, MBPP, and rows with pytest functions in KodCode's manner.

A file's columns say which: `prompt, test, entry_point` (HumanEval), `test_list` with `text` or `prompt` (MBPP), or
`question, test` (KodCode), whose tests import from `solution`. What can pass is called a case: a top-level statement
with an assert, such a statement of HumanEval's `check`, or a test function. Rows whose tests cannot run in the sandbox,
that pass without a program or that the row's own solution fails are left out and counted. docs/code.md says which those
are, and what the sandbox keeps out.
"""

from __future__ import annotations

import ast
import builtins
import fcntl
import hashlib
import json
import keyword
import logging
import math
import os
import re
import symtable
import sys
import warnings
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import asdict
from itertools import count
from pathlib import Path
from typing import Any

import datasets.config
from datasets import Dataset
from tqdm import tqdm

from d1.rows import lines_of
from d1.sandbox import DEFAULT, WORKERS, Cases, Limits, passed, shares_passed, working_python
from d1.sandbox.box import INSIDE
from d1.sandbox.inside import MODULE
from d1.tasks import MAX_TEXT, Completion, answer_block, format_completion, problem, text_of
from d1.tasks.data import JSON, check_split, read_problems, task_rows, text_in

logger = logging.getLogger(__name__)

Read = Callable[[str, Any], tuple[str | None, Cases]]  # (completion, ground truth) -> its program and the tests

INSTRUCTIONS = "Write the Python program that is asked for."
ANSWER = "the whole program in a ```python block"
HUMANEVAL, MBPP, FIRST_MBPP = ("prompt", "test", "entry_point"), ("prompt", "test_list"), ("text", "test_list")
KODCODE = ("question", "test")
TRAIN, TEST = ("KodCode/KodCode-V1", None), ("openai/openai_humaneval", None)
CONCURRENT = WORKERS  # calls of `score` that evaluation may make at a time

_FENCE = re.compile(r"```(?:python|py)?[ \t]*\n(.*?)(?:```|\Z)", re.DOTALL)


def load_rows(split: str, data_file: str | None = None, limits: Limits = DEFAULT) -> Dataset:
    """Rows of `data_file`; else KodCode-V1 for training and validation, HumanEval for the test, from the hub.

    Each row's tests run in the sandbox before it is kept (`fault_of`); the verdicts are kept on disk.

    Raises:
        SandboxError: there is no sandbox here.
        ValueError: the file has other columns, or no row can be used.
    """
    check_split(split)
    working_python()
    source, rows = read_problems(split, data_file, TRAIN, TEST, HUMANEVAL, MBPP, FIRST_MBPP, KODCODE)
    problems, faults = {}, {}
    for number, row in enumerate(rows, start=1):
        try:
            problems[number] = _task_row(row)
        except ValueError as error:
            faults[number] = str(error)
        except RecursionError:
            faults[number] = "its tests are nested too deeply"
    verdicts = zip(problems, tried(source, [*problems.values()], limits), strict=True)
    faults |= {number: fault for number, fault in verdicts if fault}
    kept = [row for number, row in problems.items() if number not in faults]
    first = ""
    if faults:
        number, fault = min(faults.items())
        line = lines_of(rows, [number - 1]).get(number - 1)
        first = f"row {number}, {fault}" + (f" ({line})" if line else "")
    if not kept:
        raise ValueError(f"{source}: no row can be used: {first}")
    if faults:
        logger.warning("%s: %d of %d rows left out, first %s", source, len(faults), len(rows), first)
    return task_rows(source, kept, dict, JSON)


def _task_row(row: dict[str, Any]) -> dict[str, Any]:
    manner = _humaneval if "entry_point" in row else _mbpp if "test_list" in row else _kodcode
    question, prefix, tests, solution = manner(row)
    truth = {"prefix": prefix, **vars(tests), "names": list(tests.names)}
    solution = solution if isinstance(solution, str) else ""
    if not solution:  # otherwise the sandbox says whether the tests can pass
        check_names(tests)
    return problem(question, INSTRUCTIONS, ANSWER, truth, solution=solution)


# ---- rows whose tests say nothing, or cannot be passed

IDLE = "def __getattr__(name):\n    return lambda *given, **named: None"  # has each name, and none does anything
REFUSES = """
def __getattr__(name):
    def refuse(*given, **named):
        raise NotImplementedError
    return refuse
"""


def tried(source: str, rows: Sequence[dict[str, Any]], limits: Limits) -> list[str]:
    """`fault_of` each row; `source` is for the log. Verdicts are kept in a file next to the caches of `datasets`; while
    one process runs the tests of new rows, others wait for its verdicts, so that all have the same rows."""
    folder = Path(datasets.config.HF_DATASETS_CACHE)
    folder.mkdir(parents=True, exist_ok=True)
    python = working_python()
    version = [IDLE, REFUSES, INSIDE.read_text(), asdict(limits), python, os.stat(python).st_mtime_ns]
    texts = [json.dumps([row["ground_truth"], row["solution"], version], sort_keys=True) for row in rows]
    keys = [hashlib.sha256(text.encode()).hexdigest() for text in texts]
    with (folder / "d1_code_rows.jsonl").open("a+", encoding="utf-8") as file, ThreadPoolExecutor(WORKERS) as pool:
        fcntl.flock(file, fcntl.LOCK_EX)
        file.seek(0)
        known: dict[str, str] = {}
        for line in file:
            with suppress(ValueError):  # the last line of a process that was killed
                known |= [json.loads(line)]
        new = {key: row for key, row in zip(keys, rows, strict=True) if key not in known}
        if new:
            logger.info("%s: running the tests of %d rows in the sandbox, once; see %s", source, len(new), file.name)
        verdicts = pool.map(lambda row: fault_of(row, limits), new.values())
        for key, fault in zip(new, tqdm(verdicts, "tests", len(new), unit="row", disable=None, delay=1), strict=True):
            known[key] = fault
            file.write(f"\n{json.dumps([key, fault])}")
            file.flush()
    return [known[key] for key in keys]


def fault_of(row: dict[str, Any], limits: Limits = DEFAULT) -> str:
    """Why a row is left out, or "". Its tests must fail for functions that do nothing, no case may pass with every
    program, and its solution, if it has one, must pass all cases."""
    tests, prefix = tests_of(row["ground_truth"])
    # A case that passes in vain would pay for every program: first functions that return None, then ones that raise.
    idle = passed(IDLE, tests, limits)
    if len(idle) == tests.count:
        return "its tests pass with functions that do nothing"
    if idle and (always := idle & passed(REFUSES, tests, limits)):
        return f"case {min(always) + 1} of its tests passes with every program"
    if row["solution"]:
        right = (prefix + row["solution"], tests, limits)
        found = passed(*right)
        if len(found) < tests.count:  # once more: the machine may have been busy
            found = passed.__wrapped__(*right)
        if len(found) < tests.count:
            return f"its own solution passes {len(found)} of the {tests.count} cases of its tests"
    return ""


# ---- the three manners

Made = tuple[str, str, Cases, Any]  # question, what goes before the program, tests, solution


def _humaneval(row: dict[str, Any]) -> Made:
    """The prompt's own helpers and imports are there for the tests, too, so that no program replaces them."""
    prompt, entry = text_in(row, "prompt"), text_in(row, "entry_point")
    if not entry.isidentifier() or keyword.iskeyword(entry):
        raise ValueError(f"entry_point must be the name of a function, got {entry!r:.80}")
    source, _, cases = with_cases(text_in(row, "test"), within="check")
    Imports().visit(parsed(prompt, "prompt"))
    tests = Cases(f"{source}\ncheck({entry})", (entry,), cases, prompt)
    return f"Complete this function:\n\n{prompt.strip()}", prompt + "\n", tests, row.get("canonical_solution")


def _mbpp(row: dict[str, Any]) -> Made:
    """The first test is shown, because it has the function's name and the form of its arguments."""
    listed, imports = row["test_list"], row.get("test_imports") or []
    if not isinstance(listed, list) or not all(isinstance(test, str) for test in listed) or not listed:
        raise ValueError(f"test_list must be a list of tests, got {listed!r:.80}")
    if not isinstance(imports, list):
        raise ValueError(f"test_imports must be a list of imports, got {imports!r:.80}")
    setup = "\n".join([str(row.get("test_setup_code") or ""), *map(str, imports)])
    Imports().visit(parsed(setup, "test_setup_code or test_imports"))
    source, _, cases = with_cases("\n".join(listed))
    # The tests import nothing: what they read is the program's, or a module of the standard library.
    free = free_names(f"{setup}\n{source}")
    modules = sorted(free & sys.stdlib_module_names)
    setup = "\n".join([*(f"import {name}" for name in modules), setup])
    question = f"{text_in(row, 'text' if row.get('text') else 'prompt')}\n\nOne of the tests:\n{listed[0]}"
    names, solution = tuple(sorted(free - {*modules})), row.get("code")
    hidden = [name for name in names if not re.search(rf"\b{re.escape(name)}\b", question)]
    if hidden and not solution:
        raise ValueError(f"its tests read the name {hidden[0]}, which neither the question nor the first test says")
    return question, "", Cases(source, names, cases, setup), solution


def _kodcode(row: dict[str, Any]) -> Made:
    question = text_in(row, "question").strip()
    source, names, cases = with_cases(text_in(row, "test"))
    infos = row.get("test_info")
    infos = [info for info in infos if isinstance(info, dict)] if isinstance(infos, list) else []
    declared = [info.get("function_declaration") for info in infos]
    wanted = [name for name in declared if name] or wanted_by(source, names)
    question = f"{question}\n\nName in the program: {', '.join(map(str, wanted))}"
    return question, "", Cases(source, names, cases), row.get("solution")


def wanted_by(source: str, names: Sequence[str]) -> list[str]:
    """The names that a program needs: those imported from it, and attributes that tests read of it as a module."""
    nodes = list(ast.walk(parsed(source)))
    modules = [node.targets for node in nodes if isinstance(node, ast.Assign) and ast.unparse(node.value) == MODULE]
    called = {ast.unparse(target) for targets in modules for target in targets}
    read = [node.attr for node in nodes if isinstance(node, ast.Attribute) and ast.unparse(node.value) in called]
    return [*dict.fromkeys([*(name for name in names if name != MODULE), *read])]


def parsed(source: Any, what: str = "test") -> ast.Module:
    try:
        return ast.parse(source)
    except (SyntaxError, ValueError, TypeError, RecursionError, MemoryError) as error:
        raise ValueError(f"{what} is no Python: {error}") from None


class Imports(ast.NodeTransformer):
    """Replaces imports of `solution` by assignments, and refuses those of what the sandbox does not have.

    Attributes:
        names: what is imported from `solution`; `MODULE` for the module, "*" for all of its names.
    """

    def __init__(self) -> None:
        self.names: list[str] = []

    def visit_Import(self, node: ast.Import) -> Any:
        ours = [alias for alias in node.names if alias.name == "solution"]
        node.names = [alias for alias in node.names if alias not in ours]
        refuse_foreign([alias.name for alias in node.names])
        self.names += [MODULE] * bool(ours)
        made = [ast.parse(f"{alias.asname or alias.name} = {MODULE}").body[0] for alias in ours]
        return [*made, *([node] if node.names else [])]

    def visit_ImportFrom(self, node: ast.ImportFrom) -> Any:
        if node.module != "solution":
            refuse_foreign([node.module or "their own package"])
            return node
        self.names += [alias.name for alias in node.names]
        return [ast.parse(f"{alias.asname} = {alias.name}").body[0] for alias in node.names if alias.asname]

    def generic_visit(self, node: ast.AST) -> ast.AST:
        super().generic_visit(node)
        if getattr(node, "body", None) == [] and not isinstance(node, ast.Module):
            node.body = [ast.Pass()]  # type: ignore[attr-defined]
        return node


def refuse_foreign(modules: Sequence[str]) -> None:
    if foreign := {name.partition(".")[0] for name in modules} - sys.stdlib_module_names:
        raise ValueError(f"the tests import {min(foreign)}, which the sandbox does not have")


def with_cases(source: str, within: str = "") -> tuple[str, tuple[str, ...], int]:
    """For `d1.sandbox.Cases`: the source with its cases marked, the names that it imports from `solution`, and the
    number of cases.

    Args:
        within: a function whose statements are the cases, instead of those around it.

    Raises:
        ValueError: there is no case, or one that cannot run in the sandbox.
    """
    numbers, imports = count(), Imports()
    body, last = list[ast.stmt](), list[ast.stmt]()

    def case(statement: ast.stmt) -> ast.stmt:
        call = ast.Call(ast.Name("__case__", ast.Load()), [ast.Constant(next(numbers))], [])
        return ast.With([ast.withitem(call)], [statement])

    def marked(statement: ast.stmt) -> ast.stmt:
        return case(statement) if asserts(statement) else statement

    # Statements are marked where they stand; test functions are called, as cases, after all statements.
    for node in imports.visit(parsed(source)).body:
        if isinstance(node, ast.AsyncFunctionDef) and (node.name == within or node.name.startswith("test")):
            raise ValueError(f"{node.name} is async, and nothing here awaits it")
        if isinstance(node, ast.FunctionDef) and node.name == within:
            if not takes(node.args, 1):
                raise ValueError(f"{within} must take one argument, the function")
            node.body = [marked(statement) for statement in node.body]
        elif isinstance(node, ast.FunctionDef) and node.name.startswith("test"):
            if node.args.args or node.decorator_list or not takes(node.args, 0):
                raise ValueError(f"{node.name} takes parameters or has a decorator")
            last.append(case(ast.Expr(ast.Call(ast.Name(node.name, ast.Load()), [], []))))
        elif isinstance(node, ast.ClassDef) and node.name.startswith("Test"):
            raise ValueError(f"{node.name}: tests in classes do not run here")
        body.append(node if within else marked(node))
    tree = ast.fix_missing_locations(ast.Module([*body, *last], []))
    if not (cases := next(numbers)):
        raise ValueError("there is no assert that runs and no test function")
    names, source = imports.names, ast.unparse(tree)
    check_compiles(source)
    if "*" in names:
        names = [*(name for name in names if name != "*"), *sorted(free_names(source) - {*names})]
    return source, tuple(dict.fromkeys(names)), cases


def takes(parameters: ast.arguments, count: int) -> bool:
    """Whether a function with these parameters can be called with `count` positional arguments and no others."""
    positional = len(parameters.posonlyargs) + len(parameters.args)
    required = positional - len(parameters.defaults)
    most = math.inf if parameters.vararg else positional
    return required <= count <= most and None not in parameters.kw_defaults


def check_compiles(source: str, what: str = "test") -> None:
    """Raise ValueError for a source that is parsed and still no program, such as a `return` outside of functions."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            compile(source, what, "exec", dont_inherit=True)
        except (SyntaxError, ValueError) as error:
            raise ValueError(f"{what} is no Python: {error}") from None


def check_names(tests: Cases) -> None:
    """Raise ValueError for tests that read a name that neither they nor the program define: no program passes them."""
    check_compiles(tests.setup, "the code before the tests")
    if star_imports(f"{tests.setup}\n{tests.source}"):
        return
    defined, missing = {*dir(builtins), "__case__", MODULE}, set[str]()
    of_setup = symtable.symtable(tests.setup, "setup", "exec")
    defined |= names_made(of_setup)
    missing |= {one.get_name() for one in of_setup.get_symbols() if one.is_referenced()} - defined  # it runs first
    of_tests = symtable.symtable(without_main(tests.source), "tests", "exec")
    missing |= names_read(of_tests) - names_made(of_tests) - {*tests.names} - defined
    if missing:
        raise ValueError(f"its tests read the name {min(missing)}, which nothing defines")


def star_imports(source: str) -> bool:
    imports = (node for node in ast.walk(parsed(source)) if isinstance(node, ast.ImportFrom))
    return any(alias.name == "*" and node.module != "solution" for node in imports for alias in node.names)


def without_main(source: str) -> str:
    """A source without what runs only in a script."""
    tree = parsed(source)
    tree.body = [node for node in tree.body if not is_main(node)]
    return ast.unparse(tree)


def is_main(node: ast.AST) -> bool:
    return isinstance(node, ast.If) and ast.unparse(node.test) == "__name__ == '__main__'"


def scopes(table: symtable.SymbolTable) -> list[symtable.SymbolTable]:
    """A scope and all scopes within it."""
    return [table, *(inner for child in table.get_children() for inner in scopes(child))]


def names_made(module: symtable.SymbolTable) -> set[str]:
    """The global names that a module defines."""
    symbols = [(scope, symbol) for scope in scopes(module) for symbol in scope.get_symbols()]
    made = [symbol for scope, symbol in symbols if scope is module or symbol.is_declared_global()]
    return {symbol.get_name() for symbol in made if symbol.is_assigned() or symbol.is_imported()}


def names_read(module: symtable.SymbolTable) -> set[str]:
    """The global names that a module reads, also in functions."""
    symbols = [(scope, symbol) for scope in scopes(module) for symbol in scope.get_symbols()]
    read = [symbol for scope, symbol in symbols if symbol.is_referenced() and (scope is module or symbol.is_global())]
    return {symbol.get_name() for symbol in read}


def asserts(node: ast.AST) -> bool:
    """Whether a statement runs an assert itself: not in a function or class that it only defines, nor in a script's
    `if __name__ == "__main__"`."""
    inner = (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)
    if isinstance(node, inner) or is_main(node):
        return False
    if isinstance(node, ast.Assert):
        return not isinstance(node.test, ast.Constant)  # HumanEval has `assert True, "good for debugging"`
    return any(asserts(part) for part in ast.iter_child_nodes(node) if not isinstance(part, ast.expr))


def free_names(source: str) -> set[str]:
    """Names that a source reads without defining them, except Python's own."""
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
    tests, prefix = tests_of(truth)
    program = extract(text)
    return program and prefix + program, tests


def tests_of(truth: Any) -> tuple[Cases, str]:
    """The tests of a row, and what goes before its program."""
    try:
        return Cases(truth["source"], tuple(truth["names"]), truth["count"], truth["setup"]), truth["prefix"]
    except (TypeError, KeyError):
        raise ValueError(f"the ground truth must be tests of this task, got {truth!r:.80}") from None


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
