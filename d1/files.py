"""Files of runs and models: one line if a disk is full, and the mode that the umask gives."""

from __future__ import annotations

import errno
import os
import re
import shutil
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

FULL = {errno.ENOSPC, errno.EDQUOT, errno.EFBIG}
# How messages of PyTorch 2.13 begin if it cannot write a file; it drops the system's reason.
TORCH = ("[enforce fail at inline_container", "PytorchStreamWriter failed writing", "basic_ios::clear", "write(): fd ")


@contextmanager
def writing(folder: Path, what: str, advice: str | Callable[[], str]) -> Iterator[None]:
    """Inside, a file that has no room raises an OSError of one line.

    Args:
        folder: where `what` (e.g. "checkpoint-8") is written; the message names both, and the room that is left.
        advice: what to do, or a function that says it when the writing fails.
    """
    try:
        yield
    except Exception as error:  # safetensors, PyTorch and shutil have their own classes
        reason = no_room(error)
        if not reason:
            raise
        there = next(parent for parent in (folder.absolute(), *folder.absolute().parents) if parent.is_dir())
        free = shutil.disk_usage(there).free / 1e9
        todo = advice if isinstance(advice, str) else advice()
        raise OSError(f"no room for {what} in {folder} ({reason}; {free:.1f} GB are free there): {todo}") from error


def no_room(error: Exception) -> str:
    """The reason in an error of writing a file if it is a full disk, a quota or a limit of size; else an empty string.

    PyTorch gives no reason, so that any failure of its writing counts.
    """
    text = str(error)
    for number in map(int, re.findall(r"(?:os error |Errno )(\d+)", text)):
        if number in FULL:
            return os.strerror(number)
    unwritten = text.startswith(TORCH) and "Reader" not in text
    return "a file could not be written to its end" if unwritten else ""


def give_usual_mode(files: Iterable[Path]) -> None:
    """Give files that safetensors 0.8 wrote, with mode 600, the mode that the umask gives."""
    umask = os.umask(0o077)
    os.umask(umask)
    for file in files:
        with suppress(PermissionError):  # of another user
            file.chmod(0o666 & ~umask)
