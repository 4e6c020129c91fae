"""Imports on first use: the names of a package, so that its modules without torch import quickly, and user files."""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping
from importlib import import_module
from importlib.machinery import SourceFileLoader
from importlib.util import module_from_spec, spec_from_file_location
from pathlib import Path
from types import ModuleType
from typing import Any


def lazily(room: str, homes: Mapping[str, str]) -> Callable[[str], Any]:
    """The `__getattr__` of the package `room` (PEP 562); `homes` maps each name to the module that defines it."""

    def find(name: str) -> Any:
        if name not in homes:
            raise AttributeError(f"module {room!r} has no attribute {name!r}")
        return getattr(import_module(f"{room}.{homes[name]}"), name)

    return find


class Uncached(SourceFileLoader):
    """Reads a file as it is now. Python's cache takes a file of the same size and second of change for the same."""

    def path_stats(self, path: str) -> Mapping[str, Any]:
        raise OSError("no cache")  # what the loader expects where there is none


def module_in(path: Path, name: str) -> ModuleType:
    """Run a user's `.py` file as the module `name`; if it raises, the module is removed again."""
    loader = Uncached(name, str(path))
    spec = spec_from_file_location(name, path, loader=loader)
    assert spec is not None  # it never is with a loader
    module = module_from_spec(spec)
    sys.modules[name] = module
    try:
        loader.exec_module(module)
    except BaseException:
        del sys.modules[name]
        raise
    return module
