"""The folder that a run writes to, and files that are either complete or absent."""

from __future__ import annotations

import os
from contextlib import suppress
from pathlib import Path


def check_output_dir(folder: str | Path) -> None:
    """Refuse (ValueError) a folder that cannot be created or written, before anything is loaded. Creates nothing."""
    path = Path(folder).absolute()
    there = next(parent for parent in (path, *path.parents) if parent.exists())
    if not there.is_dir():
        raise ValueError(f"--output_dir {folder}: {there} is a file, not a folder; name another")
    if not os.access(there, os.W_OK | os.X_OK):
        raise ValueError(f"--output_dir {folder}: you may not write to {there}; name another folder")


def write_atomically(path: Path, text: str) -> None:
    """Replace `path` as a whole: readers see the old content or the new, never a part."""
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
