"""Check that the tests notice faults of the core: change one operator or number at random, run tests, count.

    python -m tests.mutants --count 60 --seed 0

Each mutant is a copy of the core in which one comparison, sum, product, `and`, `or`, `not`, constant or flag differs.
Its tests are the file of its own module first, then those that import the module, then those of its room in `make
test-core`; the first failure ends it. A mutant that survives is printed as a diff: a test is missing, or the change has
no effect. Each mutant takes from seconds to ten minutes, on one core.
"""

from __future__ import annotations

import argparse
import ast
import difflib
import os
import random
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from importlib import import_module
from pathlib import Path
from typing import NamedTuple

from d1.ranges import COUNT, SEED
from d1.runs.cli import OneLineParser, run_script

ROOT = Path(__file__).resolve().parents[1]
CORE = ("masking.py", "models", "sampling", "scoring", "sft", "rl", "eval", "runs")
LIBRARIES = ("torch", "transformers", "trl", "peft", "datasets", "pytest", "hypothesis")  # imported once, before forks
SECONDS = 1200  # of one mutant: a loop without end is noticed, too

COMPARISONS = {
    ast.Lt: "<=",
    ast.LtE: "<",
    ast.Gt: ">=",
    ast.GtE: ">",
    ast.Eq: "!=",
    ast.NotEq: "==",
    ast.In: "not in",
    ast.NotIn: "in",
    ast.Is: "is not",
    ast.IsNot: "is",
}
OPERATIONS = {
    ast.Add: "-",
    ast.Sub: "+",
    ast.Mult: "/",
    ast.Div: "*",
    ast.FloorDiv: "*",
    ast.BitAnd: "|",
    ast.BitOr: "&",
}


class Mutant(NamedTuple):
    path: Path  # relative to the root
    line: int
    text: str  # the whole module, changed


def between(left: ast.expr, right: ast.expr) -> tuple[int, int, int]:
    """Line and columns of the text between two expressions on one line."""
    assert left.end_lineno is not None
    assert left.end_col_offset is not None
    return left.end_lineno, left.end_col_offset, right.col_offset


def changes(tree: ast.AST) -> Iterator[tuple[int, int, int, str]]:
    """(line, first column, last column, new text) of each change in a module. Texts, annotations and messages stay."""
    for node in executed(tree):
        if isinstance(node, ast.Compare) and len(node.ops) == 1:
            left, right = node.left, node.comparators[0]
            if left.end_lineno == right.lineno:
                yield (*between(left, right), f" {COMPARISONS[type(node.ops[0])]} ")
        elif isinstance(node, ast.BinOp) and type(node.op) in OPERATIONS:
            if node.left.end_lineno == node.right.lineno and not has_text(node):
                yield (*between(node.left, node.right), f" {OPERATIONS[type(node.op)]} ")
        elif isinstance(node, ast.BoolOp):
            left, right = node.values[0], node.values[1]
            if left.end_lineno == right.lineno:
                yield (*between(left, right), " or " if isinstance(node.op, ast.And) else " and ")
        elif isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.Not):
            yield node.lineno, node.col_offset, node.operand.col_offset, ""
        elif isinstance(node, ast.Constant) and isinstance(node.value, bool | int):
            assert node.end_col_offset is not None
            new = not node.value if isinstance(node.value, bool) else node.value + 1
            yield node.lineno, node.col_offset, node.end_col_offset, str(new)


def executed(tree: ast.AST) -> Iterator[ast.AST]:
    """The nodes of a module that compute something: no annotations, errors, or declarations of flags."""
    for name, value in ast.iter_fields(tree):
        if name in ("annotation", "returns"):
            continue
        for node in value if isinstance(value, list) else [value]:
            if not isinstance(node, ast.AST) or isinstance(node, ast.Raise | ast.JoinedStr | ast.Assert):
                continue
            if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id in ("setting", "field"):
                continue
            if isinstance(node, ast.If) and "TYPE_CHECKING" in ast.unparse(node.test):
                continue
            yield node
            yield from executed(node)


def has_text(node: ast.BinOp) -> bool:
    """Whether a text is added or repeated, or types are joined with `|`."""
    words = [part for part in ast.walk(node) if isinstance(part, ast.Constant | ast.JoinedStr)]
    return any(isinstance(word, ast.JoinedStr) or isinstance(word.value, str | None) for word in words)


def all_mutants() -> list[Mutant]:
    mutants = []
    for room in CORE:
        start = ROOT / "d1" / room
        for path in sorted(start.rglob("*.py") if start.is_dir() else [start]):
            text = path.read_text()
            lines = text.splitlines(keepends=True)
            for line, first, last, new in changes(ast.parse(text)):
                old = lines[line - 1].encode()  # columns of `ast` count bytes
                changed = [*lines]
                changed[line - 1] = (old[:first] + new.encode() + old[last:]).decode()
                if compiles("".join(changed)):
                    mutants.append(Mutant(path.relative_to(ROOT), line, "".join(changed)))
    return mutants


def compiles(text: str) -> bool:
    try:
        ast.parse(text)
    except SyntaxError:
        return False
    return True


def tests_of(path: Path) -> list[str]:
    """The test files for a module, those first that are nearest to it."""
    makefile = (ROOT / "Makefile").read_text()
    listed = re.search(r"^CORE = ((?:.*\\\n)*.*)$", makefile, re.MULTILINE)
    assert listed is not None
    core = [f"tests/d1/{name}" for name in listed[1].replace("\\", " ").split()]

    inside = path.relative_to("d1")
    mirrored = Path("tests/d1") / inside.parent / f"test_{inside.name}"
    nearest = [str(mirrored)] if (ROOT / mirrored).exists() else []
    package, _, name = ".".join(path.with_suffix("").parts).rpartition(".")
    imports = re.compile(rf"\b{re.escape(package)}(\.{name}\b| import .*\b{name}\b)")
    naming = [
        str(file.relative_to(ROOT))
        for file in sorted((ROOT / "tests" / "d1").rglob("test_*.py"))
        if imports.search(file.read_text())
    ]
    room = [name for name in core if Path(name).parts[2] == inside.parts[0]]
    return list(dict.fromkeys([*nearest, *naming, *room]))


def copy_repository(folder: Path) -> None:
    """Copy the files that git knows or does not ignore."""
    command = ["git", "ls-files", "--cached", "--others", "--exclude-standard"]
    for name in subprocess.run(command, cwd=ROOT, check=True, capture_output=True, text=True).stdout.splitlines():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy2(ROOT / name, folder / name)


def noticed_by(folder: Path, tests: list[str], log: Path) -> str:
    """The test that fails in the copy of the repository in `folder`, or another reason; empty if it is not noticed."""
    child = os.fork()
    if child == 0:
        os.setsid()
        os.chdir(folder)
        sys.path[:] = [str(folder), *[entry for entry in sys.path if entry not in ("", str(ROOT))]]
        os.environ["PYTHONPATH"] = str(folder)
        for name in [name for name in sys.modules if name.split(".")[0] in ("d1", "tests")]:
            del sys.modules[name]
        output = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
        os.dup2(output, 1)
        os.dup2(output, 2)
        import pytest

        os._exit(int(pytest.main(["-q", "-x", "-n", "0", "-p", "no:cacheprovider", *tests])))
    deadline = time.monotonic() + SECONDS
    while time.monotonic() < deadline:
        done, status = os.waitpid(child, os.WNOHANG)
        if done:
            failed = re.findall(r"^(?:FAILED |ERROR:? )(.+)", log.read_text(errors="replace"), re.MULTILINE)
            return (failed or [f"status {status}"])[0] if status else ""
        time.sleep(0.2)
    os.killpg(child, signal.SIGKILL)
    os.waitpid(child, 0)
    return f"no end after {SECONDS} s"


def make_parser() -> argparse.ArgumentParser:
    parser = OneLineParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--count", type=COUNT, default=60, help="mutants that are tried")
    parser.add_argument("--seed", type=SEED, default=0, help="which ones are drawn")
    parser.add_argument("--numbers", type=COUNT, nargs="+", help="which of the drawn ones are tried (default: all)")
    return parser


def main(args: argparse.Namespace) -> None:
    for name in LIBRARIES:
        import_module(name)
    drawn = random.Random(args.seed).sample(all_mutants(), args.count)
    survivors = 0
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name) / "copy"
        copy_repository(folder)
        for number in args.numbers or range(1, args.count + 1):
            mutant = drawn[number - 1]
            original = (ROOT / mutant.path).read_text()
            (folder / mutant.path).write_text(mutant.text)
            started = time.monotonic()
            by = noticed_by(folder, tests_of(mutant.path), Path(name) / "log")
            (folder / mutant.path).write_text(original)
            survivors += not by
            where = f"{number} of {args.count}, {time.monotonic() - started:.0f} s: {mutant.path}:{mutant.line}"
            sys.stdout.write(f"{where} {f'is noticed by {by}' if by else 'SURVIVED'}\n")
            if not by:
                lines = [text.splitlines() for text in (original, mutant.text)]
                sys.stdout.write("\n".join(difflib.unified_diff(*lines, n=1, lineterm="")) + "\n")
            sys.stdout.flush()
    sys.stdout.write(f"{survivors} of {len(args.numbers or drawn)} survived\n")


if __name__ == "__main__":
    run_script("mutants", lambda: main(make_parser().parse_args()))
