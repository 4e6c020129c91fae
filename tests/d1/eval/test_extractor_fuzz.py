"""10,000 strings per scorer: for any model output, d1's released rules give a score quickly and execute nothing.

The tasks' own extractors have theirs in tests/d1/tasks.
"""

from __future__ import annotations

import time
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from d1.eval.files import read_problem
from d1.eval.scores import SCORERS, score_published

ROWS: dict[str, dict[str, Any]] = {
    "gsm8k": {"question": "", "ground_truth": 18.0},
    "math": {"question": "", "ground_truth": r"\frac{1}{2}"},
    "countdown": {"question": "", "ground_truth": [[3, 4, 5], 27]},
    "sudoku": {"question": "Solve the following Sudoku puzzle: 0234341221434300\n", "ground_truth": "1234341221434321"},
}
PIECES = [
    *(r"\boxed{", r"\boxed ", r"\fbox{", "{", "}", "<answer>", "</answer>", "<reasoning>", "```", "$"),
    *(r"\frac", r"\sqrt", r"\text{ ", r"\times", r"\div", r"\cdot", r"\left", r"\%", "=", "x"),
    *("**", "//", *"+-*/()., \n\x00", "...", "1e999", "nan", "<|eot_id|>", "<|endoftext|>", "١", "²"),
    *("1", "2", "3", "4", "5", "18", "99", "0.5", "1234341221434321"),
]
TEXTS = st.one_of(
    st.text(max_size=200),
    st.lists(st.sampled_from(PIECES), max_size=60).map("".join),
    st.lists(st.one_of(st.sampled_from(PIECES), st.text(max_size=3)), max_size=40).map("".join),
    st.tuples(st.sampled_from(PIECES), st.integers(0, 5_000)).map(lambda pair: pair[0] * pair[1]),
)


@pytest.mark.slow
@pytest.mark.parametrize("task", SCORERS)
@settings(max_examples=10_000, deadline=None)
@given(text=TEXTS)
def test_published_scorers_take_any_string(task, text):
    started = time.process_time()
    right, total = score_published(task, text, ROWS[task])
    assert 0 <= right <= total
    assert total == (3 if task == "sudoku" else 1)
    assert time.process_time() - started < 1


JSON: st.SearchStrategy = (
    st.none() | st.booleans() | st.integers() | st.floats() | st.text() | st.lists(st.text()) | st.just({})
)


FIELDS = ["question", "generations", "text", "tokens", "edits", "first_text", "index", "ground_truth"]


@settings(max_examples=1_000, deadline=None)
@given(item=st.dictionaries(st.sampled_from(FIELDS), JSON) | JSON)
def test_items_of_any_shape_are_read_or_refused(item):
    try:
        read = read_problem("file, item 0", item)
    except TypeError:
        return
    assert all(isinstance(text, str) for text in (read.question, read.raw, read.text, read.key))
