"""The tables of RL's parts, and methods by name or by a user's file, whose parts join the tables.

Importing this module adds the parts that belong to one paper (`d1/rl/methods/`) to the tables.
"""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import Any, NamedTuple
from zlib import crc32

from d1.lazy import module_in
from d1.ranges import nearest
from d1.rl.hints import HINTS
from d1.rl.losses import ADVANTAGES, OBJECTIVES, PENALTIES
from d1.rl.methods import METHODS, Method, pairs_of_papers, papers_of_parts, parts_of_papers
from d1.scoring import ESTIMATORS

# A method's file, a published one or a user's own, may define entries of these tables besides `METHOD`.
TABLES: dict[str, dict[str, Any]] = {
    "ESTIMATORS": ESTIMATORS,
    "OBJECTIVES": OBJECTIVES,
    "PENALTIES": PENALTIES,
    "ADVANTAGES": ADVANTAGES,
    "HINTS": HINTS,
}
TABLE_OF = {
    "estimator": "ESTIMATORS",
    "objective": "OBJECTIVES",
    "kl": "PENALTIES",
    "advantage": "ADVANTAGES",
    "hints": "HINTS",
}
for table_name, table_entries in TABLES.items():
    table_entries.update(parts_of_papers(table_name))


class MethodFile(NamedTuple):
    """A user's file that ran."""

    text: bytes
    method: Method
    tables: dict[str, dict[str, Any]]  # as `TABLES`, of the file alone


METHOD_FILES: dict[Path, MethodFile] = {}
PAPERS = {kind: papers_of_parts(table) for kind, table in TABLE_OF.items()}  # a part of one paper -> its method


def may_combine(chosen: dict[str, str]) -> bool:
    """Whether two chosen parts {kind: name} are not of two papers, or are shown together somewhere (`SHOWN_PAIRS`)."""
    papers = {PAPERS[kind][name] for kind, name in chosen.items() if name in PAPERS[kind]}
    return len(papers) < 2 or frozenset(chosen.values()) in pairs_of_papers()


def shared_parts(kind: str) -> str:
    """The names of the entries that belong to no single paper."""
    return ", ".join(name for name in TABLES[TABLE_OF[kind]] if name not in PAPERS[kind])


def find_method(name: str) -> Method:
    """The entry of `METHODS` with this name, or the method that a user's `.py` file defines; the file's entries join
    the tables.

    Raises:
        ValueError: there is no such method; or the file fails, has no `METHOD`, has wrong entries in its tables, or
            uses a name that is taken.
        FileNotFoundError: there is no such file.
    """
    if name in METHODS:
        return METHODS[name]
    if not str(name).endswith(".py"):
        known = ", ".join(METHODS)
        hint = nearest(name, METHODS)
        raise ValueError(f"--method must be one of {known}, or a path to a .py file, got {name!r}{hint}")
    path = Path(name).resolve()
    if not path.is_file():
        raise FileNotFoundError(f"no method file {path}")
    # A file runs once, so that its entries stay the same objects, and again after it was edited, as in a notebook.
    text = path.read_bytes()
    if path in METHOD_FILES and METHOD_FILES[path].text != text:
        remove_method_file(path)
    if path not in METHOD_FILES:
        METHOD_FILES[path] = run_method_file(path, text)
    file = METHOD_FILES[path]
    for table, user_entries in file.tables.items():
        TABLES[table].update(user_entries)
    return file.method


def run_method_file(path: Path, text: bytes) -> MethodFile:
    """What a user's file with this `text` defines. ValueError as in `find_method`."""
    try:
        module = module_in(path, f"d1_user_method_{path.stem}_{crc32(str(path).encode()):08x}")
        user_tables = {table: getattr(module, table, {}) for table in TABLES}

        # `METHOD` is a dictionary, like the tables, or a `Method`, as in the published methods' files.
        dictionaries = dict(user_tables)
        method: Any = getattr(module, "METHOD", None)
        if not isinstance(method, Method):
            dictionaries["METHOD"] = method
        for table, values in dictionaries.items():
            if not isinstance(values, dict) or not all(isinstance(key, str) for key in values):
                raise ValueError(f"{table} must be a dictionary with names as keys, {table} = {{...}}, got {values!r}")

        for table, user_entries in user_tables.items():
            check_table(table, user_entries)
    except Exception as error:
        kind = "" if isinstance(error, ValueError) else f"{type(error).__name__}: "
        raise ValueError(f"method file {path}: {kind}{error}") from error
    if not isinstance(method, Method):
        method = Method(str(path), method)
    return MethodFile(text=text, method=method, tables=user_tables)


def remove_method_file(path: Path) -> None:
    """Remove the entries of a user's file from the tables."""
    for table, user_entries in METHOD_FILES.pop(path).tables.items():
        for name in user_entries:
            TABLES[table].pop(name, None)


def check_table(table: str, user_entries: dict[str, Any]) -> None:
    """Raises ValueError unless a user's table has new entries of the right class."""
    entries = TABLES[table]
    kind = type(next(iter(entries.values())))
    room = kind.__module__.rpartition(".")[0]
    for name, entry in user_entries.items():
        if not isinstance(entry, kind):
            raise ValueError(f"{table}[{name!r}] must be a {kind.__name__}(function), of {room}; got {entry!r}")
        if entries.get(name, entry) is not entry:
            raise ValueError(f"{table} already has {name}; choose another name")


def check_names(method: Method, settings: Iterable[str]) -> None:
    """Raises ValueError if a method or an entry names something that is not one of the run's `settings`."""
    named = {f"method {method.paper}: METHOD": {*method.scale, *method.values}}
    for table, entries in TABLES.items():
        for name, entry in entries.items():
            named[f"{table}[{name!r}]"] = {*(getattr(entry, "settings", None) or ())}
    known = {*settings}
    for where, setting_names in named.items():
        wrong = sorted(setting_names - known)
        if wrong:
            raise ValueError(f"{where} has {', '.join(wrong)}, which is not a setting of RL")
