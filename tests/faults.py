"""What can go wrong around a run, made on purpose: for tests of any room."""

from __future__ import annotations

import os
import resource
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

# --- The clock --------------------------------------------------------------------------------------------------------


def clock_steps_back(folder: Path, seconds: float = 3600.0) -> None:
    """The clock steps back: what is below `folder` was changed later than anything that is written from now on."""
    for path in (folder, *folder.rglob("*")):
        times = path.stat()
        os.utime(path, (times.st_atime + seconds, times.st_mtime + seconds))


def write_at_the_same_time(file: Path, content: bytes) -> None:
    """The content changes, but not the time of the last change: a copy with its times, or a clock that stepped back."""
    times = file.stat()
    file.write_bytes(content)
    os.utime(file, ns=(times.st_atime_ns, times.st_mtime_ns))


# --- Files ------------------------------------------------------------------------------------------------------------


def flip_bit(file: Path, share: float = 0.75) -> None:
    """One bit of a file differs, of the byte at this share of its length; its size and times stay."""
    content = bytearray(file.read_bytes())
    content[int(len(content) * share)] ^= 1
    write_at_the_same_time(file, bytes(content))


@contextmanager
def full_disk(room: int) -> Iterator[None]:
    """Inside, no file of this process can grow beyond `room` bytes: the system answers as for a full disk, EFBIG."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (room, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


# --- Models -----------------------------------------------------------------------------------------------------------

# --- Servers ----------------------------------------------------------------------------------------------------------

# --- The sandbox ------------------------------------------------------------------------------------------------------
