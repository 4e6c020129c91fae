"""Generation files for the tests of eval/."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest

SOLUTION = "1234341221434321"


def write_sudoku_file(path: Path, right: int, of: int, *, expected: int | None = None, tokens: int | None = 20) -> None:
    """A file of `of` puzzles with two empty cells each, as eval.py writes it: the first `right` of them solved."""
    items = []
    for number in range(of):
        first, second = number, 15 - number % 7
        puzzle = "".join("0" if cell in (first, second) else digit for cell, digit in enumerate(SOLUTION))
        text = f"<answer>{SOLUTION}</answer>" if number < right else "<answer></answer>"
        counts = {} if tokens is None else {"tokens": tokens, "forward_passes": 16}
        question = f"Solve the following Sudoku puzzle: {puzzle}\n"
        items.append(
            {"question": question, "prompt_input": question, "generations": text + "<eos>", "text": text}
            | {"ground_truth": SOLUTION, "index": number}
            | counts
        )
    content = {"generations": items, "task": "sudoku", "expected_problems": expected or of}
    path.write_text(json.dumps(content))


@pytest.fixture(scope="session")
def write_sudoku() -> Callable[..., None]:
    return write_sudoku_file
