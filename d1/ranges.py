"""Ranges of numeric settings, each declared next to its setting; and the nearest name to one that does not exist.

In a dataclass, it is part of the type, `beta: Annotated[float, AMOUNT] = 0.04`; in a parser, it is the `type`,
`add_argument("--limit", type=COUNT)`. `|` adds other values: `COUNT | None`, `COUNT | -1`, `NATURAL | "max"`.
"""

from __future__ import annotations

import argparse
import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from difflib import get_close_matches
from typing import get_type_hints


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
        if any(value in other if isinstance(other, Range) else value == other for other in self.also):
            return True
        if self.many:
            one = replace(self, many=False, also=())
            return isinstance(value, (list, tuple)) and all(number in one for number in value)
        try:
            number = math.nan if isinstance(value, bool) else float(value)  # type: ignore[arg-type]
        except (TypeError, ValueError, OverflowError):
            return False
        if not math.isfinite(number) or (self.integer and not number.is_integer()):
            return False
        above = number > self.low if self.open_low else number >= self.low
        return above and (number < self.high if self.open_high else number <= self.high)

    def __str__(self) -> str:
        """The range in the words of a message, such as "an integer in [1, inf) or None"."""
        kind = ("integers " if self.integer else "numbers ") if self.many else "an integer " if self.integer else ""
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
    hints = get_type_hints(config, include_extras=True)
    notes = {name: getattr(hint, "__metadata__", ()) for name, hint in hints.items()}
    return {name: note for name, some in notes.items() for note in some if isinstance(note, Range)}


def check_ranges(settings: Mapping[str, object], ranges: Mapping[str, Range]) -> None:
    """Raise a ValueError that names all settings out of their range, as a user types them, with values and ranges."""
    wrong = [
        f"--{name} {' '.join(map(str, value)) if isinstance(value, (list, tuple)) else value} (must be {ranges[name]})"
        for name, value in settings.items()
        if name in ranges and value not in ranges[name]
    ]
    if wrong:
        raise ValueError("out of range: " + "; ".join(wrong))


def nearest(name: object, known: Iterable[object], cutoff: float = 0.65) -> str:
    """For a message: " (the nearest is X)", the known name that is most like `name`; empty if none is. `cutoff`, from 0
    to 1, says how alike they must be (`difflib`)."""
    found = get_close_matches(str(name), [str(one) for one in known if one is not None], 1, cutoff)
    return f" (the nearest is {found[0]})" if found else ""
