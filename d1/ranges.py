"""Fields of dataclasses that are flags, ranges of numeric settings, each declared next to its setting, and the nearest
name to one that does not exist.

In a dataclass, it is part of the type, `beta: Annotated[float, AMOUNT] = 0.04`; in a parser, it is the `type`,
`add_argument("--limit", type=COUNT)`. `|` adds other values: `COUNT | None`, `COUNT | -1`, `NATURAL | "max"`.
"""

from __future__ import annotations

import argparse
import copy
import math
from collections.abc import Iterable, Mapping
from dataclasses import MISSING, dataclass, field, replace
from difflib import get_close_matches
from typing import Any, TypeVar, get_type_hints, overload


@dataclass(frozen=True)
class Range:
    """Finite numbers from `low` to `high`. A bool is not a number."""

    low: float = -math.inf
    high: float = math.inf
    open_low: bool = False  # `low` itself is excluded
    open_high: bool = False  # `high` itself is excluded
    integer: bool = False  # whole numbers only
    many: bool = False  # a list of such numbers
    also: tuple[object, ...] = ()  # other values that are allowed; a `Range` among them allows all of its values

    def __or__(self, other: object) -> Range:
        return replace(self, also=(*self.also, other))

    def __contains__(self, value: object) -> bool:
        for other in self.also:
            if isinstance(other, Range):
                if value in other:
                    return True
            elif value == other:
                return True
        if self.many:
            single = replace(self, many=False, also=())
            return isinstance(value, (list, tuple)) and all(number in single for number in value)

        if isinstance(value, bool):
            return False
        try:
            number = float(value)  # type: ignore[arg-type]
        except (TypeError, ValueError, OverflowError):
            return False
        if not math.isfinite(number) or (self.integer and not number.is_integer()):
            return False
        if number < self.low or number > self.high:
            return False
        is_excluded = (self.open_low and number == self.low) or (self.open_high and number == self.high)
        return not is_excluded

    def __str__(self) -> str:
        """The range in the words of a message, such as "an integer in [1, inf) or None"."""
        kind = ""
        if self.many:
            kind = "integers " if self.integer else "numbers "
        elif self.integer:
            kind = "an integer "
        left = "(" if self.open_low or math.isinf(self.low) else "["
        right = ")" if self.open_high or math.isinf(self.high) else "]"
        return " or ".join([f"{kind}in {left}{self.low}, {self.high}{right}", *map(str, self.also)])

    def __call__(self, text: str) -> object:
        """Convert a word of a command line; argparse's error if it is neither a number nor an allowed word. Whether the
        number is in the range is checked later, for all flags at once."""
        if text in self.also:
            return text
        try:
            return int(text) if self.integer else float(text)
        except ValueError:
            raise argparse.ArgumentTypeError(f"must be {self}, got {text!r}") from None

    def convert(self, value: Any) -> Any:
        """A value of a yaml file as a number, or a list of numbers: text such as 1e-1, which YAML does not read as one,
        and 2.0 where whole numbers are asked for. Anything else is unchanged, for `check_ranges`."""
        if self.many and isinstance(value, list):
            single = replace(self, many=False)
            return [single.convert(item) for item in value]
        if not isinstance(value, str | float):
            return value
        try:
            number = float(value)
        except ValueError:
            return value
        if self.integer and number.is_integer():
            return int(number)
        return number


NUMBER = Range()
AMOUNT = Range(0)
POSITIVE = Range(0, open_low=True)
SHARE = Range(0, 1)
BELOW_ONE = Range(0, 1, open_high=True)
NATURAL = Range(0, integer=True)
COUNT = Range(1, integer=True)
SEED = Range(0, 2**32 - 1, integer=True)  # the seeds that NumPy takes


def ranges_of(config: type) -> dict[str, Range]:
    """The ranges in the annotations of a dataclass, by field. Fields without one are left out."""
    ranges = {}
    for name, hint in get_type_hints(config, include_extras=True).items():
        for note in getattr(hint, "__metadata__", ()):
            if isinstance(note, Range):
                ranges[name] = note
    return ranges


def check_ranges(settings: Mapping[str, object], ranges: Mapping[str, Range]) -> None:
    """Raise a ValueError that names all settings out of their range, as a user types them, with values and ranges."""
    wrong = []
    for name, value in settings.items():
        if name in ranges and value not in ranges[name]:
            words = " ".join(map(str, value)) if isinstance(value, (list, tuple)) else value
            wrong.append(f"--{name} {words} (must be {ranges[name]})")
    if wrong:
        raise ValueError("out of range: " + "; ".join(wrong))


def nearest(name: object, known: Iterable[object], cutoff: float = 0.65) -> str:
    """For a message: " (the nearest is X)", the known name that is most like `name`; empty if none is. `cutoff`, from 0
    to 1, says how alike they must be (`difflib`)."""
    names = [str(known_name) for known_name in known if known_name is not None]
    matches = get_close_matches(str(name), names, 1, cutoff)
    if not matches:
        return ""
    return f" (the nearest is {matches[0]})"


# --- Fields that are flags --------------------------------------------------------------------------------------------

T = TypeVar("T")


@overload
def setting(default: T, help: str = "", **options: Any) -> T: ...
@overload
def setting(*, help: str = "", **options: Any) -> Any: ...
def setting(default: Any = MISSING, help: str = "", **options: Any) -> Any:
    """A field of a dataclass that is also a flag. Without a default, the flag is required.

    Args:
        help: text of the flag in --help.
        options: more arguments of `add_argument`, and these:
            aliases: other names of the flag, such as ["--model_path"].
            flag: the flag, if it is not "--" and the field's name.
            positional: True for an argument without a flag.
            group: title of a group in --help, which this flag begins and the flags of later fields join; "" ends one.
    """
    start: Any = {"default_factory": lambda: copy.copy(default)} if isinstance(default, list) else {"default": default}
    return field(**start, metadata={"help": help, **options})
