"""Imports on first use: the names of a package, so that its modules without torch import quickly, and user files."""

from __future__ import annotations

import inspect
import sys
from collections.abc import Callable, Mapping
from importlib import import_module
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


def functions_in(path: Path, name: str) -> list[Callable[..., Any]]:
    """The public functions that a user's `.py` file defines, in their order in the file, which runs as `module_in`."""
    return [
        value
        for key, value in vars(module_in(path, name)).items()
        if inspect.isfunction(value) and value.__module__ == name and not key.startswith("_")
    ]
