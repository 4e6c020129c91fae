"""Programs that a model wrote, run or judged by tests in a sandbox; see docs/code.md."""

from d1.sandbox.box import (
    DEFAULT,
    WORKERS,
    Cases,
    Limits,
    SandboxError,
    output_of,
    passed,
    shares_passed,
    working_python,
)

__all__ = [
    "DEFAULT",
    "WORKERS",
    "Cases",
    "Limits",
    "SandboxError",
    "output_of",
    "passed",
    "shares_passed",
    "working_python",
]
