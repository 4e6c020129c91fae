"""Evaluation: generate completions for a task's problems, store them in files, and score them."""

from __future__ import annotations

from typing import TYPE_CHECKING

from d1.lazy import lazily

if TYPE_CHECKING:
    from d1.eval.run import evaluate as evaluate

HOMES = {
    "evaluate": "run",
}
__getattr__ = lazily(__name__, HOMES)
