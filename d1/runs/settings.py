"""Dataclasses of settings, and the command line made from one. Needs no torch."""

from __future__ import annotations

import copy
from dataclasses import MISSING, field, fields
from typing import Any, TypeVar, get_type_hints

from d1.ranges import check_ranges, ranges_of
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
            raise ValueError(f"--{one.name} must be one of {', '.join(choices)}, got {value!r}")


class ConfigParser(OneLineParser):
    """A parser with one flag per field of a dataclass; `parse_args` returns an instance. Switches are off by default.

    Transformers' HfArgumentParser does the same, but takes seconds to import.
    """

    def __init__(self, config: type, prog: str | None = None, **options: Any) -> None:
        super().__init__(prog, **options)
        self.config = config
        hints, ranges = get_type_hints(config), ranges_of(config)
        for one in fields(config):
            more = dict(one.metadata)
            names = [f"--{one.name}", *more.pop("aliases", [])]
            if hints[one.name] is bool:
                more["action"] = "store_true"
            else:
                more["default"] = one.default if one.default_factory is MISSING else one.default_factory()
                more["type"] = ranges.get(one.name, str)
            self.add_argument(*names, **more)

    def parse_args(self, args: Any = None, namespace: Any = None) -> Any:  # type: ignore[override]
        return self.config(**vars(super().parse_args(args, namespace)))
