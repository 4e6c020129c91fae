"""Sudoku: extraction from every way to write a grid, cell share, exact solves, and other valid grids."""

import pytest

from d1.tasks import sudoku

PUZZLE, SOLUTION = "0102230010030400", "4132231412433421"
ROW = {"question": f"Solve the following Sudoku puzzle: {PUZZLE}\n", "ground_truth": SOLUTION}
EMPTY = [i for i, digit in enumerate(PUZZLE) if digit == "0"]
CELLS = [f"{'abcdefghijklmnop'[i]}{digit}" for i, digit in enumerate(SOLUTION)]
GRID_LINES = [SOLUTION[i : i + 4] for i in range(0, 16, 4)]


@pytest.mark.parametrize(
    "written",
    [
        SOLUTION,
        " ".join(SOLUTION),
        "\n".join(GRID_LINES),
        "\n".join("| " + " | ".join(line) + " |" for line in GRID_LINES),
        "-".join(GRID_LINES),
        " ".join(CELLS),
        rf"\boxed{{{SOLUTION}}}",
    ],
)
def test_every_way_to_write_the_grid(written):
    text = f"<reasoning> careful c3 </reasoning> <answer> {written} </answer><|eot_id|>"
    assert sudoku.extract(text) == SOLUTION
    assert sudoku.score(text, ROW) == {"accuracy": 1.0, "cells": 1.0}
    assert sudoku.cells_reward([text], question=[ROW["question"]], ground_truth=[SOLUTION]) == [1.0]


def wrong_at(cells):
    return "".join(str(int(digit) % 4 + 1) if i in cells else digit for i, digit in enumerate(SOLUTION))


@pytest.mark.parametrize(
    ("answer", "right"),
    [
        (wrong_at(EMPTY[:3]), 6),
        (wrong_at(EMPTY[-1:]), 8),  # accuracy is of whole grids, where d1 reported cells
        (PUZZLE, 0),
        (SOLUTION[:8], sum(i < 8 for i in EMPTY)),
        (SOLUTION + "1", 9),
        (SOLUTION.translate(str.maketrans("1234", "2143")), 0),  # obeys every rule, keeps no given
        ("no grid", 0),
    ],
)
def test_cell_share_counts_only_the_originally_empty_cells(answer, right):
    assert len(EMPTY) == 9
    assert sudoku.score(f"<answer>{answer}</answer>", ROW) == {"accuracy": 0.0, "cells": right / 9}


def test_another_grid_that_obeys_the_rules_is_a_solve():
    puzzle = "1234341200000000"
    row = {"question": f"Solve the following Sudoku puzzle: {puzzle}\n", "ground_truth": "1234341221434321"}
    for grid in ("1234341221434321", "1234341243212143"):
        assert sudoku.score(f"<answer>{grid}</answer>", row) == {"accuracy": 1.0, "cells": 1.0}
    assert sudoku.score("<answer>1234341221432143</answer>", row)["accuracy"] == 0.0


def test_a_question_without_a_puzzle_is_refused():
    with pytest.raises(ValueError, match="no puzzle of 16 digits"):
        sudoku.score("<answer>1</answer>", {"question": "Solve 012", "ground_truth": SOLUTION})
