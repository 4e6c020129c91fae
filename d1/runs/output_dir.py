"""The folder a run writes to: can it be written, and is there room?"""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

# How Python, safetensors (Rust's words) and torch.save (its last two) say that a file could not be written to its end.
FULL = (
    *("No space left on device", "Disk quota exceeded", "File too large"),
    *("PytorchStreamWriter failed", "unexpected pos"),
)


def check_output_dir(folder: str | Path) -> None:
    """Refuses (ValueError) a folder that could not be made or written, before anything is loaded. Creates nothing."""
    path = Path(folder).absolute()
    there = existing(path)
    if not there.is_dir():
        raise ValueError(f"--output_dir {folder}: {there} is a file, not a folder; name another")
    if not os.access(there, os.W_OK | os.X_OK):
        raise ValueError(f"--output_dir {folder}: you may not write to {there}; name another folder")


def existing(path: Path) -> Path:
    """The path, or else the nearest folder above it that exists."""
    return next(parent for parent in (path, *path.parents) if parent.exists())


@contextmanager
def writing(path: str | Path) -> Iterator[None]:
    """Inside, what fails because the disk or the user's quota is full becomes an OSError that names `path`."""
    try:
        yield
    except Exception as error:  # libraries have their own classes for it
        if not any(text in str(error) for text in FULL):
            raise
        free = shutil.disk_usage(existing(Path(path).absolute())).free / 2**30
        raise OSError(
            f"could not write {path}: the disk or your share of it is full ({free:.1f} GiB are free there). Make room "
            "and continue: what was saved before is whole"
        ) from error


def write_atomically(path: Path, text: str) -> None:
    """Replaces `path` as a whole: readers see the old content or the new, never a part."""
    staging = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        with open(staging, "w", encoding="utf-8") as file:
            file.write(text)
            file.flush()
            os.fsync(file.fileno())
        os.replace(staging, path)
    except OSError as error:
        with suppress(OSError):
            staging.unlink()
        raise OSError(error.errno, error.strerror, str(path)) from error
