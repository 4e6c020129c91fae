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
import threading
import warnings
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import asdict
from itertools import count, islice
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

ReadProgram = Callable[[str, Any], tuple[str | None, Cases]]  # (completion, ground truth) -> program and tests

INSTRUCTIONS = "Write the Python program that is asked for."
ANSWER = "the whole program in a ```python block"
HUMANEVAL = ("prompt", "test", "entry_point")
MBPP = ("prompt", "test_list")
FIRST_MBPP = ("text", "test_list")
KODCODE = ("question", "test")
TRAIN = ("KodCode/KodCode-V1", None)
TEST = ("openai/openai_humaneval", None)
CONCURRENT = WORKERS  # calls of `score` that evaluation may make at a time

# The blanks before a fence, and its mark; at the beginning of a line, "``` python" has one, too
_OPENING = re.compile(r"(?:^([ \t]*))?```(?(1)(?:[ \t]+(?=(?i:python3?|py)\s))?)([\w+#.-]*)[ \t]*\r?\n", re.MULTILINE)
_CLOSING = re.compile(r"(^[ \t]*)?```", re.MULTILINE)
MAX_FENCES = 16  # that may end one block
_warnings_lock = threading.Lock()  # programs are read in several threads, and Python's filters are those of the process
_PYTHON = ("python", "python3", "py")
_FUTURE = re.compile(r"^from __future__ import (?:\([^)]*\)|.*)\n?", re.MULTILINE)


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
    problems: dict[int, dict[str, Any]] = {}
    faults: dict[int, str] = {}
    for number, row in enumerate(rows, start=1):
        try:
            problems[number] = _task_row(row)
        except ValueError as error:
            faults[number] = str(error)
        except RecursionError:
            faults[number] = "its tests are nested too deeply"
    verdicts = find_faults(source, list(problems.values()), limits)
    for number, fault in zip(problems, verdicts, strict=True):
        if fault:
            faults[number] = fault

    usable = [row for number, row in problems.items() if number not in faults]
    first_fault = ""
    if faults:
        number, fault = min(faults.items())
        first_fault = f"row {number}, {fault}"
        line = lines_of(rows, [number - 1]).get(number - 1)
        if line:
            first_fault += f" ({line})"
    if not usable:
        raise ValueError(f"{source}: no row can be used: {first_fault}")
    if faults:
        logger.warning("%s: %d of %d rows left out, first %s", source, len(faults), len(rows), first_fault)
    return task_rows(source, usable, dict, JSON)


def _task_row(row: dict[str, Any]) -> dict[str, Any]:
    if "entry_point" in row:
        question, prefix, tests, solution = _humaneval(row)
    elif "test_list" in row:
        question, prefix, tests, solution = _mbpp(row)
    else:
        question, prefix, tests, solution = _kodcode(row)
    truth = {"prefix": prefix, **vars(tests), "names": list(tests.names)}
    if not isinstance(solution, str):
        solution = ""
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


def find_faults(source: str, rows: Sequence[dict[str, Any]], limits: Limits) -> list[str]:
    """`fault_of` each row; `source` is for the log. Verdicts are kept in a file next to the caches of `datasets`; while
    one process runs the tests of new rows, others wait for its verdicts, so that all have the same rows."""
    folder = Path(datasets.config.HF_DATASETS_CACHE)
    folder.mkdir(parents=True, exist_ok=True)
    python = working_python()
    version = [IDLE, REFUSES, INSIDE.read_text(), asdict(limits), python, os.stat(python).st_mtime_ns]
    keys = []
    for row in rows:
        text = json.dumps([row["ground_truth"], row["solution"], version], sort_keys=True)
        keys.append(hashlib.sha256(text.encode()).hexdigest())
    with (folder / "d1_code_rows.jsonl").open("a+", encoding="utf-8") as file, ThreadPoolExecutor(WORKERS) as pool:
        fcntl.flock(file, fcntl.LOCK_EX)
        file.seek(0)
        faults: dict[str, str] = {}
        for line in file:
            with suppress(ValueError):  # the last line of a process that was killed
                key, fault = json.loads(line)
                faults[key] = fault
        new_rows = {key: row for key, row in zip(keys, rows, strict=True) if key not in faults}
        total = len(new_rows)
        if new_rows:
            logger.info("%s: running the tests of %d rows in the sandbox, once; see %s", source, total, file.name)

        def find_fault(row: dict[str, Any]) -> str:
            return fault_of(row, limits)

        verdicts = tqdm(pool.map(find_fault, new_rows.values()), "tests", total, unit="row", disable=None, delay=1)
        for key, fault in zip(new_rows, verdicts, strict=True):
            faults[key] = fault
            file.write(f"\n{json.dumps([key, fault])}")
            file.flush()
    return [faults[key] for key in keys]


def fault_of(row: dict[str, Any], limits: Limits = DEFAULT) -> str:
    """Why a row is left out, or "". Its tests must fail for functions that do nothing, no case may pass with every
    program, and its solution, if it has one, must pass all cases."""
    tests, prefix = tests_of(row["ground_truth"])
    # A case that passes in vain would pay for every program: first functions that return None, then ones that raise.
    idle_cases = passed(IDLE, tests, limits)
    if len(idle_cases) == tests.count:
        return "its tests pass with functions that do nothing"
    if idle_cases:
        vain_cases = idle_cases & passed(REFUSES, tests, limits)
        if vain_cases:
            return f"case {min(vain_cases) + 1} of its tests passes with every program"
    if row["solution"]:
        program = after_prefix(prefix, row["solution"])
        solved_cases = passed(program, tests, limits)
        if len(solved_cases) < tests.count:  # once more: the machine may have been busy
            solved_cases = passed.__wrapped__(program, tests, limits)
        if len(solved_cases) < tests.count:
            return f"its own solution passes {len(solved_cases)} of the {tests.count} cases of its tests"
    return ""


# ---- the three manners

ProblemParts = tuple[str, str, Cases, Any]  # question, what goes before the program, tests, solution


def _humaneval(row: dict[str, Any]) -> ProblemParts:
    """The prompt's own helpers and imports are there for the tests, too, so that no program replaces them."""
    prompt = text_in(row, "prompt")
    entry = text_in(row, "entry_point")
    if not entry.isidentifier() or keyword.iskeyword(entry):
        raise ValueError(f"entry_point must be the name of a function, got {entry!r:.80}")
    source, _, cases = with_cases(text_in(row, "test"), within="check")
    Imports().visit(parse_python(prompt, "prompt"))
    tests = Cases(f"{source}\ncheck({entry})", (entry,), cases, prompt)
    return f"Complete this function:\n\n{prompt.strip()}", prompt + "\n", tests, row.get("canonical_solution")


def _mbpp(row: dict[str, Any]) -> ProblemParts:
    """The first test is shown, because it has the function's name and the form of its arguments."""
    test_list = row["test_list"]
    imports = row.get("test_imports") or []
    if not isinstance(test_list, list) or not all(isinstance(test, str) for test in test_list) or not test_list:
        raise ValueError(f"test_list must be a list of tests, got {test_list!r:.80}")
    if not isinstance(imports, list):
        raise ValueError(f"test_imports must be a list of imports, got {imports!r:.80}")
    setup = "\n".join([str(row.get("test_setup_code") or ""), *map(str, imports)])
    Imports().visit(parse_python(setup, "test_setup_code or test_imports"))
    source, _, cases = with_cases("\n".join(test_list))
    # The tests import nothing: what they read is the program's, or a module of the standard library.
    free = free_names(f"{setup}\n{source}")
    modules = sorted(free & sys.stdlib_module_names)
    setup = "\n".join([f"import {name}" for name in modules] + [setup])
    column = "text" if row.get("text") else "prompt"
    question = f"{text_in(row, column)}\n\nOne of the tests:\n{test_list[0]}"
    names = tuple(sorted(free - set(modules)))
    solution = row.get("code")
    hidden = [name for name in names if not re.search(rf"\b{re.escape(name)}\b", question)]
    if hidden and not solution:
        raise ValueError(f"its tests read the name {hidden[0]}, which neither the question nor the first test says")
    return question, "", Cases(source, names, cases, setup), solution


def _kodcode(row: dict[str, Any]) -> ProblemParts:
    question = text_in(row, "question").strip()
    source, names, cases = with_cases(text_in(row, "test"))
    required = []
    infos = row.get("test_info")
    if isinstance(infos, list):
        for info in infos:
            if isinstance(info, dict) and info.get("function_declaration"):
                required.append(info["function_declaration"])
    if not required:
        required = required_names(source, names)
    question = f"{question}\n\nName in the program: {', '.join(map(str, required))}"
    return question, "", Cases(source, names, cases), row.get("solution")


def required_names(source: str, names: Sequence[str]) -> list[str]:
    """The names that a program needs: those imported from it, and attributes that tests read of it as a module."""
    nodes = list(ast.walk(parse_python(source)))
    module_names: set[str] = set()  # those that the tests give to the program
    for node in nodes:
        if isinstance(node, ast.Assign) and ast.unparse(node.value) == MODULE:
            module_names.update(ast.unparse(target) for target in node.targets)
    required = [name for name in names if name != MODULE]
    for node in nodes:
        if isinstance(node, ast.Attribute) and ast.unparse(node.value) in module_names:
            required.append(node.attr)
    return list(dict.fromkeys(required))


def parse_python(source: Any, what: str = "test") -> ast.Module:
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
        statements: list[ast.stmt] = []
        other_aliases = []
        for alias in node.names:
            if alias.name == "solution":
                statements += ast.parse(f"{alias.asname or alias.name} = {MODULE}").body
            else:
                other_aliases.append(alias)
        refuse_foreign([alias.name for alias in other_aliases])
        if statements:
            self.names.append(MODULE)
        if other_aliases:
            node.names = other_aliases
            statements.append(node)
        return statements

    def visit_ImportFrom(self, node: ast.ImportFrom) -> Any:
        if node.module != "solution":
            refuse_foreign([node.module or "their own package"])
            return node
        statements: list[ast.stmt] = []
        for alias in node.names:
            self.names.append(alias.name)
            if alias.asname:
                statements += ast.parse(f"{alias.asname} = {alias.name}").body
        return statements

    def generic_visit(self, node: ast.AST) -> ast.AST:
        super().generic_visit(node)
        if getattr(node, "body", None) == [] and not isinstance(node, ast.Module):
            node.body = [ast.Pass()]  # type: ignore[attr-defined]
        return node


def refuse_foreign(modules: Sequence[str]) -> None:
    foreign = {name.partition(".")[0] for name in modules} - sys.stdlib_module_names
    if foreign:
        raise ValueError(f"the tests import {min(foreign)}, which the sandbox does not have")


def with_cases(source: str, within: str = "") -> tuple[str, tuple[str, ...], int]:
    """For `d1.sandbox.Cases`: the source with its cases marked, the names that it imports from `solution`, and the
    number of cases.

    Args:
        within: a function whose statements are the cases, instead of those around it.

    Raises:
        ValueError: there is no case, or one that cannot run in the sandbox.
    """
    numbers = count()
    imports = Imports()
    body: list[ast.stmt] = []
    test_calls: list[ast.stmt] = []

    def make_case(statement: ast.stmt) -> ast.stmt:
        call = ast.Call(ast.Name("__case__", ast.Load()), [ast.Constant(next(numbers))], [])
        return ast.With([ast.withitem(call)], [statement])

    def mark_case(statement: ast.stmt) -> ast.stmt:
        return make_case(statement) if has_assert(statement) else statement

    # Statements are marked where they stand; test functions are called, as cases, after all statements.
    for node in imports.visit(parse_python(source)).body:
        if isinstance(node, ast.AsyncFunctionDef) and (node.name == within or node.name.startswith("test")):
            raise ValueError(f"{node.name} is async, and nothing here awaits it")
        if isinstance(node, ast.FunctionDef) and node.name == within:
            if not accepts_arguments(node.args, 1):
                raise ValueError(f"{within} must take one argument, the function")
            node.body = [mark_case(statement) for statement in node.body]
        elif isinstance(node, ast.FunctionDef) and node.name.startswith("test"):
            if node.args.args or node.decorator_list or not accepts_arguments(node.args, 0):
                raise ValueError(f"{node.name} takes parameters or has a decorator")
            test_calls.append(make_case(ast.Expr(ast.Call(ast.Name(node.name, ast.Load()), [], []))))
        elif isinstance(node, ast.ClassDef) and node.name.startswith("Test"):
            raise ValueError(f"{node.name}: tests in classes do not run here")
        body.append(node if within else mark_case(node))
    tree = ast.fix_missing_locations(ast.Module(body + test_calls, []))
    cases = next(numbers)
    if not cases:
        raise ValueError("there is no assert that runs and no test function")
    source = ast.unparse(tree)
    check_compiles(source)
    names = [name for name in imports.names if name != "*"]
    if "*" in imports.names:
        names += sorted(free_names(source) - set(imports.names))
    return source, tuple(dict.fromkeys(names)), cases


def accepts_arguments(parameters: ast.arguments, count: int) -> bool:
    """Whether a function with these parameters can be called with `count` positional arguments and no others."""
    positional = len(parameters.posonlyargs) + len(parameters.args)
    required = positional - len(parameters.defaults)
    max_count = math.inf if parameters.vararg else positional
    return required <= count <= max_count and None not in parameters.kw_defaults


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
    if has_star_imports(f"{tests.setup}\n{tests.source}"):
        return
    setup = symtable.symtable(tests.setup, "setup", "exec")
    defined = {*dir(builtins), "__case__", MODULE} | defined_names(setup)
    # The setup runs first, so it cannot read names of the program or the tests.
    setup_reads = {symbol.get_name() for symbol in setup.get_symbols() if symbol.is_referenced()}
    module = symtable.symtable(without_main(tests.source), "tests", "exec")
    tests_read = names_read(module) - defined_names(module) - set(tests.names)
    missing = (setup_reads | tests_read) - defined
    if missing:
        raise ValueError(f"its tests read the name {min(missing)}, which nothing defines")


def has_star_imports(source: str) -> bool:
    """Whether a source imports all names of a module other than `solution`."""
    for node in ast.walk(parse_python(source)):
        if not isinstance(node, ast.ImportFrom) or node.module == "solution":
            continue
        if any(alias.name == "*" for alias in node.names):
            return True
    return False


def without_main(source: str) -> str:
    """A source without what runs only in a script."""
    tree = parse_python(source)
    tree.body = [node for node in tree.body if not is_main(node)]
    return ast.unparse(tree)


def is_main(node: ast.AST) -> bool:
    return isinstance(node, ast.If) and ast.unparse(node.test) == "__name__ == '__main__'"


def scopes(table: symtable.SymbolTable) -> list[symtable.SymbolTable]:
    """A scope and all scopes within it."""
    tables = [table]
    for child in table.get_children():
        tables += scopes(child)
    return tables


def defined_names(module: symtable.SymbolTable) -> set[str]:
    """The global names that a module defines."""
    names = set()
    for scope in scopes(module):
        for symbol in scope.get_symbols():
            is_of_module = scope is module or symbol.is_declared_global()
            if is_of_module and (symbol.is_assigned() or symbol.is_imported()):
                names.add(symbol.get_name())
    return names


def names_read(module: symtable.SymbolTable) -> set[str]:
    """The global names that a module reads, also in functions."""
    names = set()
    for scope in scopes(module):
        for symbol in scope.get_symbols():
            is_of_module = scope is module or symbol.is_global()
            if is_of_module and symbol.is_referenced():
                names.add(symbol.get_name())
    return names


def has_assert(node: ast.AST) -> bool:
    """Whether a statement runs an assert itself: not in a function or class that it only defines, nor in a script's
    `if __name__ == "__main__"`. An assert of a constant that is true does not count; `assert False` does."""
    definitions = (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)
    if isinstance(node, definitions) or is_main(node):
        return False
    if isinstance(node, ast.Assert):
        # HumanEval has `assert True, "good for debugging"`
        return not (isinstance(node.test, ast.Constant) and node.test.value)
    return any(has_assert(part) for part in ast.iter_child_nodes(node) if not isinstance(part, ast.expr))


def free_names(source: str) -> set[str]:
    """Names that a source reads without defining them, except Python's own."""
    loaded = set()
    defined = set()
    for node in ast.walk(parse_python(source)):
        if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Load):
            loaded.add(node.id)
        elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            defined.add(node.id)
        elif isinstance(node, ast.FunctionDef | ast.ClassDef):
            defined.add(node.name)
        elif isinstance(node, ast.arg):
            defined.add(node.arg)
        elif isinstance(node, ast.alias):
            defined.add((node.asname or node.name).partition(".")[0])
    return loaded - defined - {*dir(builtins), "__case__"}


def extract(text: str) -> str | None:
    """The program of a completion: a fenced block of its answer, else of the completion, else the answer. Of several
    blocks, it is the last one that is marked as Python, else the last one without a mark, else the last one.

    A program may have fences in its docstrings; `fenced_blocks` says where a block ends.
    """
    answer = answer_block(text)
    blocks = fenced_blocks(answer or "") or fenced_blocks(text[-MAX_TEXT:])
    if not blocks:
        return indent_as_in_text(answer, text) if answer else None
    by_mark: dict[str, str] = {}
    program = ""
    for mark, program in blocks:
        by_mark["python" if mark.lower() in _PYTHON else mark] = program
    return by_mark.get("python", by_mark.get("", program)) or None


def fenced_blocks(text: str) -> list[tuple[str, str]]:
    """The mark and the program of each fenced block of a text.

    Of the fences that follow, the one that ends a block is the first at the beginning of a line up to which the block
    is a program, else the first elsewhere. If there is none, the block ends at the next fence.
    """
    blocks = []
    opening = _OPENING.search(text)
    while opening:
        blanks, mark = opening.groups(default="")
        start = opening.end()
        fences = list(islice(_CLOSING.finditer(text, start), MAX_FENCES))
        at_line_start: list[int] = []
        elsewhere: list[int] = []
        for fence in fences:
            ends = elsewhere if fence[1] is None else at_line_start
            ends.append(fence.end() - len("```"))
        ends = at_line_start + elsewhere
        if len(fences) < MAX_FENCES:
            ends.append(len(text))  # the last fence may be missing

        end = min(ends)
        for possible_end in ends:
            if is_program(without_indentation(text[start:possible_end], blanks)):
                end = possible_end
                break
        blocks.append((mark, without_indentation(text[start:end], blanks)))
        opening = _OPENING.search(text, end + len("```"))
    return blocks


def is_program(text: str) -> bool:
    """Whether a text is Python: statements, or the body of a function."""
    if text.lstrip("\r\n")[:1].isspace():
        text = f"if True:\n{text}"
    with _warnings_lock, warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            parse_python(text)
        except ValueError:
            return False
    return True


def without_indentation(lines: str, blanks: str) -> str:
    """The program of a block in a list, whose lines have the `blanks` before its fence. Without a definition behind
    them, it is the body of a function, and stays as it is."""
    is_indented = all(line.startswith(blanks) for line in lines.splitlines() if line.strip())
    if is_indented and re.search(rf"^{blanks}(?:async def|class|def) ", lines, re.MULTILINE):
        return re.sub(rf"^{blanks}", "", lines, flags=re.MULTILINE)
    return lines


def indent_as_in_text(answer: str, text: str) -> str:
    """The answer with the blanks that its first line has in the text, two at least or a tab: it may be the body of a
    function."""
    before, match, _ = text.rpartition("<answer>")[2].partition(answer)
    blanks = before.rpartition("\n")[2]
    if match and blanks not in ("", " "):
        return blanks + answer
    return answer


def demonstrate(row: dict[str, Any]) -> str:
    """The solution that comes with a row."""
    return format_completion("", f"```python\n{row['ground_truth']['prefix']}{row['solution']}\n```")


def read_program(text: str, truth: Any) -> tuple[str | None, Cases]:
    """The program of a completion and the tests of its row."""
    tests, prefix = tests_of(truth)
    program = extract(text)
    if program:
        program = after_prefix(prefix, program)
    return program, tests


def after_prefix(prefix: str, program: str) -> str:
    """A program after its prefix; its imports from `__future__` have to come first."""
    imports = "".join(_FUTURE.findall(program))
    if not imports:
        return prefix + program
    return imports + prefix + _FUTURE.sub("", program)


def tests_of(truth: Any) -> tuple[Cases, str]:
    """The tests of a row, and what goes before its program."""
    try:
        return Cases(truth["source"], tuple(truth["names"]), truth["count"], truth["setup"]), truth["prefix"]
    except (TypeError, KeyError):
        raise ValueError(f"the ground truth must be tests of this task, got {truth!r:.80}") from None


def judged_by(
    read: ReadProgram, limits: Limits = DEFAULT
) -> tuple[list[Callable[..., list[float]]], Callable[..., Any]]:
    """REWARDS and `score` of a task whose answers are programs: `read` takes a completion and the ground truth."""

    def shares(completions: Sequence[Completion], ground_truth: Sequence[Any]) -> list[float]:
        programs, tests = [], []
        for completion, truth in zip(completions, ground_truth, strict=True):
            program, row_tests = read(text_of(completion), truth)
            programs.append(program)
            tests.append(row_tests)
        return shares_passed(programs, tests, limits)

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
