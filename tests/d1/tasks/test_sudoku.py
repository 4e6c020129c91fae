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


def test_cell_share_counts_only_the_originally_empty_cells():
    assert len(EMPTY) == 9
    grid = list(SOLUTION)
    for i in EMPTY[:3]:
        grid[i] = "1" if SOLUTION[i] != "1" else "2"
    scores = sudoku.score(f"<answer>{''.join(grid)}</answer>", ROW)
    assert scores == {"accuracy": 0.0, "cells": 6 / 9}
    assert sudoku.score(f"<answer>{PUZZLE}</answer>", ROW) == {"accuracy": 0.0, "cells": 0.0}


def test_accuracy_is_whole_grids_where_d1_reported_cells():
    almost = SOLUTION[:-1] + "2"  # the last cell is given as 0, so it is one of the nine
    assert PUZZLE[-1] == "0"
    scores = sudoku.score(f"<answer>{almost}</answer>", ROW)
    assert scores == {"accuracy": 0.0, "cells": 8 / 9}


def test_short_and_long_answers():
    first_half = sum(SOLUTION[i] == SOLUTION[:8][i] for i in EMPTY if i < 8)
    assert sudoku.score(f"<answer>{SOLUTION[:8]}</answer>", ROW) == {"accuracy": 0.0, "cells": first_half / 9}
    assert sudoku.score(f"<answer>{SOLUTION}1</answer>", ROW) == {"accuracy": 0.0, "cells": 1.0}
    assert sudoku.score("no grid", ROW) == {"accuracy": 0.0, "cells": 0.0}


def test_a_changed_given_is_not_a_solve():
    swap = str.maketrans("1234", "2143")  # obeys every rule, keeps no given
    scores = sudoku.score(f"<answer>{SOLUTION.translate(swap)}</answer>", ROW)
    assert scores["accuracy"] == 0.0


def test_another_grid_that_obeys_the_rules_is_a_solve():
    puzzle = "1234341200000000"
    row = {"question": f"Solve the following Sudoku puzzle: {puzzle}\n", "ground_truth": "1234341221434321"}
    for grid in ("1234341221434321", "1234341243212143"):
        assert sudoku.score(f"<answer>{grid}</answer>", row) == {"accuracy": 1.0, "cells": 1.0}
    assert sudoku.score("<answer>1234341221432143</answer>", row)["accuracy"] == 0.0


def test_leading_zeros_survive_a_csv_file(tmp_path):
    path = tmp_path / "rows.csv"
    path.write_text(f"Puzzle,Solution\n{PUZZLE},{SOLUTION}\n")
    (row,) = sudoku.load_rows("test", str(path))
    assert sudoku.puzzle_of(row["question"]) == PUZZLE


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
