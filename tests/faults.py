"""What can go wrong around a run, made on purpose: for tests of any room."""

from __future__ import annotations

import os
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

# --- The clock --------------------------------------------------------------------------------------------------------

# --- Files ------------------------------------------------------------------------------------------------------------

# --- Models -----------------------------------------------------------------------------------------------------------

# --- Servers ----------------------------------------------------------------------------------------------------------

# --- The sandbox ------------------------------------------------------------------------------------------------------

NO_PROCESS = "echo 'bwrap: Creating new namespace failed: Resource temporarily unavailable' >&2; exit 1"


@contextmanager
def failing_sandbox(times: int | None, failure: str = NO_PROCESS) -> Iterator[None]:
    """The next `times` starts of bubblewrap fail, or all of them if it is None; later ones work.

    Args:
        failure: what a start does instead, in the language of sh.
    """
    before = os.environ["PATH"]
    with tempfile.TemporaryDirectory() as name:  # the sandbox's user can read all its parents
        folder, fails = Path(name), Path(name) / "fails"
        fails.mkdir()
        for path in (folder, fails):
            path.chmod(0o777)
        for number in range(times or 0):
            (fails / str(number)).touch()
        once = f"for file in {fails}/*; do rm $file 2>/dev/null && {{ {failure}; }}; done"  # rm: one start per file
        lines = ["#!/bin/sh", failure if times is None else once]
        wrapper = folder / "bwrap"
        wrapper.write_text("\n".join([*lines, f'exec {shutil.which("bwrap")} "$@"\n']))
        wrapper.chmod(0o755)
        os.environ["PATH"] = f"{folder}:{before}"
        try:
            yield
        finally:
            os.environ["PATH"] = before
