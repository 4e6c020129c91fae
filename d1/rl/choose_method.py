"""From a method's name, or a user's file, to the settings it stands for."""

from __future__ import annotations

import sys
from collections.abc import Iterable
from pathlib import Path
from types import ModuleType
from typing import Any

from d1.lazy import module_in
from d1.rl.advantages import ADVANTAGES
from d1.rl.methods import METHODS, Method
from d1.rl.objectives import OBJECTIVES
from d1.rl.penalties import PENALTIES
from d1.scoring import ESTIMATORS, Estimator

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
        ValueError: no such method; the file has no `METHOD`, or takes a name that stands for something else.
        FileNotFoundError: no such file.
    """
    if name in METHODS:
        return METHODS[name]
    if not str(name).endswith(".py"):
        raise ValueError(f"--method must be one of {', '.join(METHODS)}, or a path to a .py file, got {name!r}")
    path = Path(name).resolve()
    if not path.is_file():
        raise FileNotFoundError(f"no method file {path}")
    module = module_of(path)
    if not isinstance(getattr(module, "METHOD", None), dict):
        raise ValueError(f"method file {path} does not define METHOD, a dictionary of settings: METHOD = {{...}}")
    for table, rows in TABLES.items():
        own = getattr(module, table, {})
        taken = [row for row, value in own.items() if row == "trl" or rows.get(row, value) is not value]
        if taken:
            raise ValueError(f"method file {path}: {table} has {', '.join(taken)} already; choose another name")
        if rows is ESTIMATORS and not all(isinstance(row, Estimator) for row in own.values()):
            raise ValueError(f'method file {path}: a row of ESTIMATORS is "name": Estimator(draw), of d1.scoring')
        rows.update(own)
    return Method(str(path), module.METHOD)


def module_of(path: Path) -> ModuleType:
    """The module in a file, which runs once: a row that it defines stays the same object."""
    name = f"d1_user_method_{path.stem}"
    known = sys.modules.get(name)
    if known is not None and known.__file__ == str(path):
        return known
    return module_in(path, name)


def check_names(method: Method, settings: Iterable[str]) -> None:
    """Refuses a method with values of something that is none of the run's `settings`.

    Raises:
        ValueError: says which.
    """
    unknown = sorted({*method.scale, *method.values} - {*settings})
    if unknown:
        raise ValueError(f"method {method.paper}: METHOD has {', '.join(unknown)}, which is no setting of diffu-GRPO")
