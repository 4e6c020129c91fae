"""Results as JSON lines: several processes can append to them, and they stay readable after a kill."""

from __future__ import annotations

import contextlib
import fcntl
import json
import logging
import os
from collections.abc import Callable, Sequence
from itertools import product
from pathlib import Path
from typing import Any

logger = logging.getLogger(__name__)

Run = dict[str, Any]  # what names a run, and the first part of its line


def append_line(path: Path, line: dict[str, Any]) -> None:
    """Appends a line in one write, under a lock; if a kill left an incomplete line, a new one is started."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("ab+") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        end = file.seek(0, os.SEEK_END)
        file.seek(max(0, end - 1))
        torn = file.read(1) not in (b"", b"\n")
        file.write((b"\n" if torn else b"") + json.dumps(line).encode() + b"\n")


def read_lines(path: Path) -> list[dict[str, Any]]:
    """All complete lines in their order; an empty list if there is no such file."""
    found = []
    for text in path.read_text().splitlines() if path.exists() else []:
        try:
            found.append(json.loads(text))
        except json.JSONDecodeError:  # a line that a kill left incomplete
            continue
    return found


def lines_by_job(path: Path) -> dict[str, dict[str, Any]]:
    """Job -> its line; the last one, if there are several."""
    return {line["job"]: line for line in read_lines(path)}


def complete(file: Path, runs: Sequence[Run], output: Path, line: Callable[[Run], dict[str, Any]]) -> None:
    """Appends the lines of the runs that `file` does not have. Other processes may do the same: each run has a lock.
    At the end, runs of other processes are waited for, and done here if these were killed."""
    for wait, run in product((fcntl.LOCK_NB, 0), runs):
        lock = output / "locks" / "-".join(map(str, (file.stem, *run.values())))
        lock.parent.mkdir(parents=True, exist_ok=True)
        with lock.open("a") as claim, contextlib.suppress(BlockingIOError):
            fcntl.flock(claim, fcntl.LOCK_EX | wait)
            if run not in [{name: one[name] for name in run} for one in read_lines(file)]:
                append_line(file, {**run, **line(run)})
                logger.info("done: %s", run)
