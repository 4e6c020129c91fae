"""Dataclasses of settings, and the command line that is made from one. Imports no torch."""

from __future__ import annotations

import copy
import sys
from collections.abc import Mapping
from dataclasses import MISSING, field, fields
from pathlib import Path
from typing import Any, TypeVar, get_type_hints

import yaml

from d1.ranges import check_ranges, nearest, ranges_of
from d1.runs.entry import OneLineParser

T = TypeVar("T")


def setting(default: T, help: str = "", **options: Any) -> T:
    """A field of a dataclass, with the help of its flag.

    Args:
        options: further arguments of argparse's `add_argument`, such as `choices`, and `aliases`, a list of flags.
    """
    start: Any = {"default_factory": lambda: copy.copy(default)} if isinstance(default, list) else {"default": default}
    return field(**start, metadata={"help": help, **options})  # type: ignore[no-any-return]


def check_settings(config: Any) -> None:
    """Check the ranges and choices that the fields of a dataclass declare.

    Raises:
        ValueError: names what is wrong, with its value and what it must be.
    """
    check_ranges(vars(config), ranges_of(type(config)))
    for one in fields(config):
        value, choices = getattr(config, one.name), one.metadata.get("choices")
        if choices and value != one.default and value not in choices:
            hint = nearest(value, choices)
            raise ValueError(f"--{one.name} must be one of {', '.join(choices)}, got {value!r}{hint}")


def of_methods(name: str, methods: Mapping[str, Any]) -> str:
    """For a flag's help: the setting's default in each method that has one; empty if none has."""
    values = {method: row.values[name] for method, row in methods.items() if name in row.values}
    if len(values) == len(methods) and len({*values.values()}) == 1:
        return f" (default: {next(iter(values.values()))})"
    listed = ", ".join(f"{method} {value}" for method, value in values.items())
    return f" (default: {listed})" if listed else ""


class ConfigParser(OneLineParser):
    """A parser with one flag per field of a dataclass; `parse_args` returns an instance. Switches are off by default.
    `--config FILE` reads flags from a yaml file; flags on the command line override these.

    Transformers' HfArgumentParser and TRL's TrlParser do the same, but take seconds to import.
    """

    def __init__(
        self, config: type, prog: str | None = None, methods: Mapping[str, Any] | None = None, **options: Any
    ) -> None:
        """`methods`: the rows of --method, whose `values` replace a setting's default of None."""
        super().__init__(prog, **options)
        self.config = config
        self.add_argument("--config", metavar="FILE", help="yaml file of settings, NAME: VALUE; flags override it")
        hints, ranges = get_type_hints(config), ranges_of(config)
        for one in fields(config):
            more = dict(one.metadata)
            names = [f"--{one.name}", *more.pop("aliases", [])]
            if hints[one.name] is bool:
                more["action"] = "store_true"
            else:
                more["default"] = one.default if one.default_factory is MISSING else one.default_factory()
                more["type"] = ranges.get(one.name, str)
                more["help"] += of_methods(one.name, methods or {})
            self.add_argument(*names, **more)

    def parse_args(self, args: Any = None, namespace: Any = None) -> Any:  # type: ignore[override]
        words = sys.argv[1:] if args is None else list(args)
        found = vars(super().parse_args(words, namespace))
        if file := found.pop("config"):
            found = vars(super().parse_args([*self.words_of(file), *words], namespace))
            del found["config"]
        return self.config(**found)

    def words_of(self, file: str) -> list[str]:
        """The command line that is equivalent to a yaml file of settings. `null` keeps the default.

        Raises:
            ValueError: the file is not a yaml mapping, or names an unknown setting, or the same setting twice.
            OSError: the file cannot be read.
        """
        try:
            settings = yaml.safe_load(Path(file).read_text(encoding="utf-8"))
        except (yaml.YAMLError, UnicodeDecodeError) as error:
            raise ValueError(f"--config {file} is no yaml: {error}") from error
        if not isinstance(settings, dict):
            raise ValueError(f"--config {file} must have lines NAME: VALUE, got {settings!r}")
        flags = {flag: action for action in self._actions for flag in action.option_strings if action.dest != "config"}
        words: list[str] = []
        seen: dict[str, str] = {}
        for name, value in settings.items():
            action = flags.get(f"--{name}")
            if action is None or action.dest == "help":
                hint = nearest(name, [flag.removeprefix("--") for flag in flags])
                raise ValueError(f"--config {file}: there is no such setting: {name}{hint} (--help lists them)")
            if action.dest in seen:
                raise ValueError(f"--config {file}: {seen[action.dest]} and {name} are one setting: keep one")
            seen[action.dest] = name
            if action.nargs == 0:  # a switch
                if not isinstance(value, bool):
                    raise ValueError(f"--config {file}: {name} must be true or false, got {value!r}")
                words += [f"--{name}"] if value else []
            elif isinstance(value, list):
                words += [f"--{name}", *map(str, value)]
            elif value is not None:
                words += [f"--{name}={str(value).lower() if isinstance(value, bool) else value}"]
        return words
