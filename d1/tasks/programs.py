"""Programs by example, a coding task of pocket size: from f(1), f(2) and f(3) find the expression in x that f is.

The functions are lines and squares with whole numbers up to 80: `x * 3 + 2`, `30 - x * 4`, `x * ( x + 1 ) + 5`. An
answer is whatever Python makes of it: it runs in the sandbox as the body of f, on the examples and on four inputs that
are not shown. Rows are `{"output": "2,5,8,11,14,17,20", "program": "x * 3 + 2"}`: f(0) to f(6).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

from datasets import Dataset

from d1.sandbox import Cases, working_python
from d1.tasks import answer_block, ask, format_completion
from d1.tasks.code import CONCURRENT, JUDGED, judged_by
from d1.tasks.data import JSON, file_of, read_file, task_rows

__all__ = ["CONCURRENT", "JUDGED", "REWARDS", "demonstrate", "extract", "load_rows", "score"]

INSTRUCTIONS = "Find the function f from its values at 1, 2 and 3."
ANSWER = "the expression in x alone"
COLUMNS = ("output", "program")
INPUTS = range(7)  # what an answer is judged on
LARGEST = 80  # of f(0) to f(3)


class Function(NamedTuple):
    """`kind` is "rising", "falling" or "square", `factor` the slope or what is added to x, `start` f(0)."""

    kind: str
    factor: int
    start: int

    @property
    def text(self) -> str:
        forms = {"rising": "x * {1} + {0}", "falling": "{0} - x * {1}", "square": "x * ( x + {1} ) + {0}"}
        return forms[self.kind].format(self.start, self.factor)

    @property
    def examples(self) -> tuple[int, ...]:
        return tuple(self(x) for x in (1, 2, 3))

    def __call__(self, x: int) -> int:
        slopes = {"rising": self.factor, "falling": -self.factor, "square": x + self.factor}
        return self.start + x * slopes[self.kind]


def functions() -> list[Function]:
    """All functions of the task, whose f(0) to f(3) lie between 0 and `LARGEST`. No two share their examples."""
    every = [Function("square", a, b) for a in range(10) for b in range(LARGEST + 1)]
    every += [Function(kind, a, b) for kind in ("rising", "falling") for a in range(1, 10) for b in range(LARGEST + 1)]
    return [one for one in every if 0 <= one(3) <= LARGEST]


def asked(examples: Sequence[int]) -> str:
    """The question that these values at 1, 2, 3 make."""
    return "\n".join(f"f({x}) = {y}" for x, y in enumerate(examples, start=1))


def load_rows(split: str, data_file: str | None = None) -> Dataset:
    """Problems of `dataset/programs_{split}.jsonl`, whose splits share no function, or of `data_file`.

    Raises:
        SandboxError: there is no sandbox here.
    """
    path = file_of(split, data_file, "programs_{}.jsonl")
    working_python()
    return task_rows(path, read_file(path, COLUMNS), _task_row, JSON)


def _task_row(row: dict[str, Any]) -> dict[str, Any]:
    try:
        values = [int(value) for value in row["output"].split(",")]
    except (AttributeError, ValueError):
        values = []
    if len(values) != len(INPUTS):
        raise ValueError(
            f"output must be f(0) to f({len(INPUTS) - 1}), as 2,5,8,11,14,17,20, got {row['output']!r:.80}"
        )
    question = asked(values[1:4])
    prompt = ask(question, INSTRUCTIONS, ANSWER)
    return {"prompt": prompt, "question": question, "ground_truth": values, "solution": row["program"]}


def extract(text: str) -> str | None:
    """The expression in a completion's last answer block, or None."""
    return answer_block(text) or None


def demonstrate(row: dict[str, Any]) -> str:
    """The expression that comes with a row."""
    return format_completion("", row["solution"])


def read_program(text: str, values: Any) -> tuple[str | None, Cases]:
    """A completion's answer as the function f, and a case per value."""
    if not isinstance(values, list):
        raise ValueError(f"the ground truth must be the values of f, got {values!r:.80}")
    cases = [f"with __case__({x}):\n    assert f({x}) == {int(y)}" for x, y in enumerate(values)]
    answer = extract(text)
    return answer and f"def f(x):\n    return {answer}", Cases("\n".join(cases), ("f",), len(cases))


REWARDS, score = judged_by(read_program)
