"""Skips what needs the sandbox where there is none, with the reason."""

from __future__ import annotations

import pytest

from d1.sandbox import SandboxError, working_python

SANDBOXED = ("code", "programs")  # tasks that run programs


def skip_without_sandbox(task: str = SANDBOXED[0]) -> None:
    """Skips the test that calls this, or the module, if the task needs a sandbox and there is none."""
    if task in SANDBOXED:
        try:
            working_python()
        except SandboxError as error:
            pytest.skip(f"no sandbox here: {error}", allow_module_level=True)
