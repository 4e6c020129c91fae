"""Pages with a part that a script writes, and pages that it rewrites except for a part: a person's interpretation."""

from __future__ import annotations

import re
from pathlib import Path

WRITTEN, END_OF_WRITTEN = "<!-- begin: written by `make studies` -->", "<!-- end -->"
BEGIN, END = "<!-- by hand: kept when the page is written again -->", "<!-- end of what is kept -->"


def reading(path: Path) -> str:
    """The part of the page at `path` that is kept, with its markers; an empty part if the page has none."""
    text = path.read_text() if path.exists() else ""
    found = re.search(f"{re.escape(BEGIN)}.*?{re.escape(END)}", text, re.DOTALL)
    return found[0] if found else f"{BEGIN}\n\nNothing has been read out of it yet.\n\n{END}"


def written(path: Path) -> str:
    """What `write` put into the page at `path`.

    Raises:
        ValueError: the page has no place for it.
    """
    found = re.search(f"{re.escape(WRITTEN)}\n\n(.*){re.escape(END_OF_WRITTEN)}", path.read_text(), re.DOTALL)
    if not found:
        raise ValueError(f"{path} has no part between {WRITTEN} and {END_OF_WRITTEN}")
    return found[1]


def write(path: Path, text: str) -> None:
    """Replaces the part of the page at `path` that scripts write."""
    before = written(path)
    path.write_text(path.read_text().replace(f"{WRITTEN}\n\n{before}", f"{WRITTEN}\n\n{text}"))
