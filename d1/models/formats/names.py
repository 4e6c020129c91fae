"""Weight names of a released format as a table, and how one name is turned into the other."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping


def key_mapping(table: Iterable[tuple[str, str]]) -> dict[str, str]:
    """The table (name, name it becomes) of modules or weights, where {} is the number of the block, as
    {regular expression: replacement}, the form that `from_pretrained` and `rename` take."""
    return {
        "^" + re.escape(old).replace(r"\{\}", r"(\d+)") + r"(?![^.])": new.replace("{}", r"\1") for old, new in table
    }


def rename(name: str, mapping: Mapping[str, str]) -> str:
    """`name` after the one rule of `mapping` that matches its start; unchanged where none does."""
    for pattern, replacement in mapping.items():
        renamed, count = re.subn(pattern, replacement, name)
        if count:
            return renamed
    return name
