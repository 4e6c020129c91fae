"""From a method's name, or a user's file, to the settings it stands for."""

from __future__ import annotations

import sys
from collections.abc import Iterable
from dataclasses import MISSING, fields
from pathlib import Path
from types import ModuleType
from typing import Any

from d1.lazy import module_in
from d1.rl.advantages import ADVANTAGES
from d1.rl.methods import METHODS, Method
from d1.rl.objectives import OBJECTIVES, PENALTIES
from d1.scoring import ESTIMATORS

# What a user's own file may define beside `METHOD`: rows of these tables.
TABLES: dict[str, dict[str, Any]] = {
    "ESTIMATORS": ESTIMATORS,
    "OBJECTIVES": OBJECTIVES,
    "PENALTIES": PENALTIES,
    "ADVANTAGES": ADVANTAGES,
}


def find_method(name: str) -> Method:
    """The row of a name in `METHODS`, or what a user's `.py` file defines; its rows of the tables are added.

    Raises:
        ValueError: no such method; the file fails, has no `METHOD` or something else than rows in its tables, or takes
            a name that stands for something else.
        FileNotFoundError: no such file.
    """
    if name in METHODS:
        return METHODS[name]
    if not str(name).endswith(".py"):
        raise ValueError(f"--method must be one of {', '.join(METHODS)}, or a path to a .py file, got {name!r}")
    path = Path(name).resolve()
    if not path.is_file():
        raise FileNotFoundError(f"no method file {path}")
    try:
        module = module_of(path)
        method = getattr(module, "METHOD", None)
        if not is_named(method):
            raise ValueError(f"METHOD must be a dictionary of settings, METHOD = {{...}}, got {method!r}")
        own = {table: getattr(module, table, {}) for table in TABLES}
        for table in TABLES:
            check_table(table, own[table])
    except Exception as error:
        kind = "" if isinstance(error, ValueError) else f"{type(error).__name__}: "
        raise ValueError(f"method file {path}: {kind}{error}") from error
    for table, rows in TABLES.items():
        rows.update(own[table])
    return Method(str(path), module.METHOD)


def is_named(values: Any) -> bool:
    return isinstance(values, dict) and all(isinstance(name, str) for name in values)


def check_table(table: str, own: Any) -> None:
    """Raises ValueError where a user's table holds something else than new rows of its kind, with functions in them."""
    rows = TABLES[table]
    kind = type(next(iter(rows.values())))
    example = f'{table} = {{"name": {kind.__name__}(function)}}, with {kind.__name__} of {kind.__module__}'
    if not is_named(own):
        raise ValueError(f"{table} must be a dictionary of names and rows: write {example}; got {own!r}")
    for name, row in own.items():
        if not isinstance(row, kind):
            raise ValueError(f"{table}[{name!r}] must be a row: write {example}; got {row!r}")
        if rows.get(name, row) is not row:
            raise ValueError(f"{table} has {name} already; choose another name")
        for field in fields(row):
            value = getattr(row, field.name)
            if (field.default is MISSING or callable(field.default)) and not callable(value):
                raise ValueError(f"{table}[{name!r}]: {field.name} must be a function, got {value!r}")


def module_of(path: Path) -> ModuleType:
    """The module in a file, which runs once: a row that it defines stays the same object."""
    name = f"d1_user_method_{path.stem}"
    known = sys.modules.get(name)
    if known is not None and known.__file__ == str(path):
        return known
    return module_in(path, name)


def check_names(method: Method, settings: Iterable[str]) -> None:
    """Refuses a method or a row with something that is none of the run's `settings`.

    Raises:
        ValueError: says which.
    """
    for table, rows in TABLES.items():
        for name, row in rows.items():
            if wrong := sorted({*(getattr(row, "settings", None) or ())} - {*settings}):
                raise ValueError(f"{table}[{name!r}] reads {', '.join(wrong)}, which is no setting of diffu-GRPO")
    unknown = sorted({*method.scale, *method.values} - {*settings})
    if unknown:
        raise ValueError(f"method {method.paper}: METHOD has {', '.join(unknown)}, which is no setting of diffu-GRPO")
