"""Pages that a script rewrites each time, except the text between two markers: a person's interpretation."""

from __future__ import annotations

import re
from pathlib import Path

BEGIN, END = "<!-- by hand: kept when the page is written again -->", "<!-- end of what is kept -->"


def reading(path: Path) -> str:
    """The part of the page at `path` that is kept, with its markers; an empty part if the page has none."""
    text = path.read_text() if path.exists() else ""
    found = re.search(f"{re.escape(BEGIN)}.*?{re.escape(END)}", text, re.DOTALL)
    return found[0] if found else f"{BEGIN}\n\nNothing has been read out of it yet.\n\n{END}"
