"""Programs that a model wrote, judged by tests in a sandbox; see docs/code.md."""

from d1.sandbox.box import DEFAULT, WORKERS, Cases, Limits, SandboxError, passed, shares_passed, working_python

__all__ = ["DEFAULT", "WORKERS", "Cases", "Limits", "SandboxError", "passed", "shares_passed", "working_python"]
