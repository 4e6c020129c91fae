"""d1's released rules: the published figures from d1's own files, and a small case for each of their faults."""

from __future__ import annotations

import os
import time
from pathlib import Path

import pytest

from d1.eval.files import read_setups
from d1.eval.scores import normalise, score_published, score_setup

PUZZLE = "Solve the following Sudoku puzzle: 0234341221434300\n"
SOLUTION = "1234341221434321"

FIGURES = {  # accuracy in percent and number of problems, as published
    "gsm8k_instruct_128_64": (69.29, 1130),
    "gsm8k_instruct_256_128": (76.37, 1130),
    "math500_instruct_128_64": (26.00, 500),
    "math500_instruct_256_128": (32.40, 500),
    "countdown_instruct_128_64": (20.70, 256),
    "countdown_instruct_256_128": (19.53, 256),
    "sudoku_instruct_128_64": (11.72, 256),
    "sudoku_instruct_256_128": (6.69, 256),
}


@pytest.fixture(scope="module")
def d1_setups():
    folder = os.environ.get("D1_FILES")
    if not folder:
        pytest.skip("set D1_FILES to the folder that holds d1_generations/")
    return {setup.name: setup for setup in read_setups(Path(folder) / "d1_generations")}


@pytest.mark.parametrize("name", FIGURES)
def test_published_figures_come_out_of_d1s_own_files(d1_setups, name):
    row, _ = score_setup(d1_setups[name], "published", {})
    assert row.accuracy is not None
    assert (round(row.accuracy, 2), row.n) == FIGURES[name]
    assert not row.errors
    strict, _ = score_setup(d1_setups[name], "strict", {})
    assert strict.accuracy is not None
    if name.startswith("sudoku"):  # solved puzzles, where d1 counts cells
        assert strict.accuracy < row.accuracy
        assert abs(strict.metrics["cells"] - row.accuracy) < 1
    elif not name.startswith("countdown"):  # commas, fractions and unclosed boxes are read
        assert strict.accuracy > row.accuracy


@pytest.mark.parametrize(
    ("text", "truth", "right"),
    [
        (r"\boxed{18}", 18.0, 1),
        (r"\boxed{...} then \boxed{\$5 each} then \boxed{7}", 5.0, 1),
        (r"\boxed{1,234}", 1234.0, 0),  # a comma ends a number
        (r"\boxed{1,234}", 1.0, 1),
        (r"<answer>between 3 and 4</answer>", 4.0, 1),
        (r"<answer>4", 4.0, 0),
        (r"<answer>2</answer> \boxed{3}", 3.0, 1),
        (r"\boxed{3}", None, 0),
        ("no number", None, 0),
    ],
)
def test_gsm8k(text, truth, right):
    assert score_published("gsm8k", text, {"question": "", "ground_truth": truth}) == (right, 1)


@pytest.mark.parametrize(
    ("text", "truth", "right"),
    [
        (r"\boxed{\dfrac{1}{2}}", r"\frac12", 1),
        (r"\boxed{1/2}", r"\frac{1}{2}", 1),
        (r"\boxed{0.5}", r"\frac{1}{2}", 1),
        (r"\boxed{0.25}", r"\frac{1}{4}", 0),  # only 0.5 is known to be a fraction
        (r"\boxed{\sqrt3}", r"\sqrt{3}", 1),
        (r"\boxed{x = 5}", "5", 1),
        (r"\boxed{10\%}", "10", 1),
        (r"\boxed{30^\circ}", "30", 1),
        (r"\boxed{5 \text{ cm}}", "5", 1),
        (r"\boxed{1} and \boxed{2}", "2", 1),
        (r"\boxed{a/b}", "a/b", 1),
        (r"\boxed{a/ b}", "a/b", 0),  # a slash between anything but integers stops the normalisation
        ("<answer>7</answer>", "7", 0),  # without a box the whole text is the answer
        (r"\boxed{9 <answer>7</answer>", "7", 1),  # unless a box is left open
        (r"\boxed{\frac{1}{2}", r"\frac{1}{2}", 0),
    ],
)
def test_math(text, truth, right):
    assert score_published("math", text, {"question": "", "ground_truth": truth}) == (right, 1)


@pytest.mark.parametrize(
    ("text", "right"),
    [
        (r"\boxed{3 * (4 + 5)}", 1),
        (r"\boxed{3 \times (4 + 5) = 27}", 1),
        (r"\boxed{3 * 4 + 5}", 0),
        (r"\boxed{3 * (4 + 5) + 0}", 0),  # a number that was not given
        (r"\boxed{3 * 9}", 0),
        ("<answer>3 * (4 + 5)</answer>", 0),  # without a box the whole text is the answer
        ("so 3 * (4 + 5) = 27", 1),
        (r"\boxed{3 / (4 - 5 + 1 - 1)}", 0),
        (r"\boxed{3 / (4 * 0 - 5 * 0)}", 0),
        (r"\boxed{3 (4 + 5)}", 0),
        (r"\boxed{3*(4+5}", 0),
    ],
)
def test_countdown(text, right):
    assert score_published("countdown", text, {"question": "", "ground_truth": [[3, 4, 5], 27]}) == (right, 1)


def test_a_tower_of_powers_does_not_hang():
    started = time.process_time()
    row = {"question": "", "ground_truth": [[99, 80, 50], 1]}
    assert score_published("countdown", r"\boxed{99**80**50}", row) == (0, 1)
    assert score_published("countdown", r"\boxed{(99**80)**50}", row) == (0, 1)
    assert score_published("countdown", r"\boxed{" + "(" * 20_000 + "99+80+50" + ")" * 20_000 + "}", row) == (0, 1)
    assert time.process_time() - started < 1


@pytest.mark.parametrize(
    ("text", "cells"),
    [
        (f"<answer>{SOLUTION}</answer>", 3),
        ("<answer>1234 3412 2143 4312</answer>", 1),
        (f"<answer>here: ```\n{SOLUTION}\n``` </answer>", 3),
        (f"<answer></answer>{SOLUTION}<|eot_id|>", 3),
        (f"it is {SOLUTION} </answer>", 3),
        (f"it is {SOLUTION}.", 3),
        ("<answer>1</answer>", 1),
        ("nothing", 0),
    ],
)
def test_sudoku_counts_cells(text, cells):
    assert score_published("sudoku", text, {"question": PUZZLE, "ground_truth": SOLUTION}) == (cells, 3)


def test_normalise_refuses_what_has_no_form():
    for text in (r"\sqrt", r"\frac", r"5 \text{ m} 6 \text{ cm}", "a/b"):
        with pytest.raises(ValueError):  # noqa: PT011
            normalise(text)
