"""Results as JSON lines, which several processes append to and any kill leaves readable."""

from __future__ import annotations

import fcntl
import json
import os
from pathlib import Path
from typing import Any


def append_line(path: Path, line: dict[str, Any]) -> None:
    """In one write, under a lock, and on a line of its own where a kill left half of one."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("ab+") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        end = file.seek(0, os.SEEK_END)
        file.seek(max(0, end - 1))
        torn = file.read(1) not in (b"", b"\n")
        file.write((b"\n" if torn else b"") + json.dumps(line).encode() + b"\n")


def read_lines(path: Path) -> list[dict[str, Any]]:
    """All whole lines, in their order; none of a file that is not there."""
    found = []
    for text in path.read_text().splitlines() if path.exists() else []:
        try:
            found.append(json.loads(text))
        except json.JSONDecodeError:  # what a kill left of a line
            continue
    return found
