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


@pytest.mark.parametrize(
    ("answer", "kinds", "note"),
    [
        ("1234341221434321", "given right right right", False),  # the stored solution
        ("a1 b2 c3 d1 e3 f4 g1 h2 i2 j1 k4 l3 m4 n3 o2 p1", "given right right wrong", True),
        ("1", "given empty empty empty", False),
    ],
)
def test_a_board_tells_what_was_given_and_what_is_right(answer, kinds, note):
    row = {"question": "1000341221434321", "ground_truth": "1234341221434321"}
    shown = sudoku.board(f"<answer>{answer}</answer>", row)
    assert " ".join(kind for _, _, kind in shown["rows"][0]) == kinds
    assert [kind for cells in shown["rows"][1:] for _, _, kind in cells] == ["given"] * 12
    assert [cells[0][0] for cells in shown["rows"]] == ["a", "e", "i", "m"]
    assert ("a4" in shown["note"]) == note
