"""Imports on first use: the names of a package, so that its modules without torch import quickly, and user files."""

from __future__ import annotations

import ast
import inspect
import sys
import sysconfig
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from importlib import import_module, invalidate_caches
from pathlib import Path
from types import ModuleType
from typing import Any


def lazily(room: str, homes: Mapping[str, str]) -> Callable[[str], Any]:
    """The `__getattr__` of the package `room` (PEP 562); `homes` maps names to modules."""

    def find(name: str) -> Any:
        if name not in homes:
            raise AttributeError(f"module {room!r} has no attribute {name!r}")
        return getattr(import_module(f"{room}.{homes[name]}"), name)

    return find


def module_in(path: Path, name: str) -> ModuleType:
    """Run a user's `.py` file as the module `name`; if it raises, the module is removed again.

    The file is compiled from its text: Python's cache of bytecode takes one of the same size and second for the same.
    """
    module = ModuleType(name)
    module.__file__ = str(path)
    sys.modules[name] = module
    try:
        exec(compile(path.read_bytes(), path, "exec", dont_inherit=True), vars(module))
    except BaseException:
        del sys.modules[name]
        raise
    return module


def local_imports(path: Path) -> list[Path]:
    """The files that a user's `.py` file imports, and those that they import, as far as `import` statements name them;
    not this library, nor what is installed."""
    path = path.resolve()
    folders = [path.parent, *(Path(folder or ".").resolve() for folder in sys.path if is_local(folder))]
    found, todo = dict.fromkeys([path]), [path]
    while todo:
        file = todo.pop()
        for imported in imports_of(file, folders):
            if imported not in found:
                found[imported] = None
                todo.append(imported)
    return sorted(found.keys() - {path})


def is_local(folder: str) -> bool:
    """Whether a folder of `sys.path` may have a user's own modules."""
    own = Path(folder or ".").resolve()
    installed = {Path(where).resolve() for where in sysconfig.get_paths().values()}
    if not own.is_dir() or {"site-packages", "dist-packages"} & {*own.parts}:
        return False
    return not any(own.is_relative_to(one) for one in installed)


def imports_of(file: Path, folders: Sequence[Path]) -> Iterator[Path]:
    """The files that the `import` statements of a file name, of modules and of the packages around them."""
    try:
        tree = ast.parse(file.read_bytes())
    except (SyntaxError, ValueError, RecursionError):  # reported where the file runs
        return
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            names, roots = [alias.name for alias in node.names], folders
        elif isinstance(node, ast.ImportFrom):
            names = [".".join(filter(None, (node.module, alias.name))) for alias in node.names]
            roots = [file.parents[node.level - 1]] if 0 < node.level <= len(file.parents) else folders
        else:
            continue
        for parts in (name.split(".") for name in names):
            if parts[0] != __name__.partition(".")[0]:
                yield from files_of(parts, roots)


def files_of(parts: Sequence[str], roots: Sequence[Path]) -> Iterator[Path]:
    """The files of a dotted name in the first of these folders that has it."""
    for root in roots:
        files = []
        for end in range(1, len(parts) + 1):
            module = root.joinpath(*parts[:end])
            files += [one for one in (module / "__init__.py", module.with_suffix(".py")) if one.is_file()]
        if files:
            yield from files
            return


MODULES_BEFORE: dict[Path, frozenset[str]] = {}  # of a user's file: what was imported before it first ran


@contextmanager
def fresh_imports(path: Path) -> Iterator[None]:
    """Inside, a user's file runs with its local modules as they are now, also if it ran in this process before."""
    path, writes = path.resolve(), sys.dont_write_bytecode
    before, local = MODULES_BEFORE.setdefault(path, frozenset(sys.modules)), {*local_imports(path)}
    for name, module in list(sys.modules.items()):
        file = getattr(module, "__file__", None)
        if name not in before and file is not None and Path(file).resolve() in local:
            del sys.modules[name]
    invalidate_caches()
    sys.dont_write_bytecode = True  # Python takes bytecode of a file of the same size and second for the same
    try:
        yield
    finally:
        sys.dont_write_bytecode = writes


def functions_in(path: Path, name: str) -> list[Callable[..., Any]]:
    """The public functions that a user's `.py` file defines, in their order in the file, which runs as `module_in`."""
    return [
        value
        for key, value in vars(module_in(path, name)).items()
        if inspect.isfunction(value) and value.__module__ == name and not key.startswith("_")
    ]
