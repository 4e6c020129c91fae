"""The files of dataset/: rebuilt byte for byte, unique, solvable, and never sharing a solution between splits."""

import csv
import importlib.util
import json
from fractions import Fraction
from itertools import combinations, permutations, product
from pathlib import Path

import pytest

FOLDER = Path(__file__).resolve().parents[3] / "dataset"
SPLITS = ("train", "validation", "test")


def sudoku(split: str) -> list[dict[str, str]]:
    with open(FOLDER / f"sudoku_{split}.csv", newline="") as file:
        return list(csv.DictReader(file))


def countdown(split: str, name: str = "countdown") -> list[tuple[tuple[int, ...], int]]:
    lines = (FOLDER / f"{name}_{split}.jsonl").read_text().splitlines()
    rows = [json.loads(line) for line in lines]
    return [(tuple(int(n) for n in row["input"].split(",")), int(row["output"])) for row in rows]


def solutions(cells: list[int]) -> list[list[int]]:
    """Every completion of a grid, by backtracking over its first empty cell."""
    if 0 not in cells:
        return [cells]
    i = cells.index(0)
    seen = {
        cells[j]
        for j in range(16)
        if j // 4 == i // 4 or j % 4 == i % 4 or (j // 8 == i // 8 and j % 4 // 2 == i % 4 // 2)
    }
    return [full for d in {1, 2, 3, 4} - seen for full in solutions([*cells[:i], d, *cells[i + 1 :]])]


def test_the_script_writes_the_same_bytes(tmp_path):
    spec = importlib.util.spec_from_file_location("make_problems", FOLDER / "make_problems.py")
    script = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(script)
    script.main(script.make_parser().parse_args(["--output_dir", str(tmp_path)]))
    made = sorted(tmp_path.iterdir())
    names = ["sudoku_{}.csv", "countdown_{}.jsonl", "pocket_countdown_{}.jsonl", "arithmetic_{}.jsonl"]
    names += ["programs_{}.jsonl"]
    assert [path.name for path in made] == sorted(name.format(split) for name in names for split in SPLITS)
    for path in made:
        assert path.read_bytes() == (FOLDER / path.name).read_bytes(), path.name
    script.main(script.make_parser().parse_args(["--output_dir", str(tmp_path), "--seed", "1"]))
    assert (tmp_path / "sudoku_test.csv").read_bytes() != (FOLDER / "sudoku_test.csv").read_bytes()


@pytest.mark.parametrize(("split", "rows", "grids"), [("train", 4000, 200), ("validation", 512, 44), ("test", 512, 44)])
def test_sudoku_puzzles_have_six_holes_and_one_solution(split, rows, grids):
    puzzles = sudoku(split)
    assert len({row["Puzzle"] for row in puzzles}) == len(puzzles) == rows
    assert len({row["Solution"] for row in puzzles}) == grids
    for row in puzzles:
        assert row["Puzzle"].count("0") == 6
        assert solutions([int(c) for c in row["Puzzle"]]) == [[int(c) for c in row["Solution"]]]


def test_sudoku_solution_grids_are_disjoint_between_splits():
    assert len(solutions([0] * 16)) == 288
    grids = [{row["Solution"] for row in sudoku(split)} for split in SPLITS]
    assert sum(map(len, grids)) == 288
    for a, b in combinations(grids, 2):
        assert not a & b


def reachable(numbers: tuple[int, ...], target: int) -> bool:
    def apply(sign, x, y):
        if sign == "/":
            return x / y if y else None
        return x + y if sign == "+" else x - y if sign == "-" else x * y

    for (a, b, c), s, t in product(permutations(map(Fraction, numbers)), "+-*/", "+-*/"):
        left, right = apply(s, a, b), apply(t, b, c)
        if (left is not None and apply(t, left, c) == target) or (right is not None and apply(s, a, right) == target):
            return True
    return False


@pytest.mark.parametrize(("split", "count"), [("train", 2000), ("validation", 256), ("test", 256)])
def test_countdown_problems_can_be_solved(split, count):
    problems = countdown(split)
    assert len(problems) == count
    for numbers, target in problems:
        assert len(numbers) == 3
        assert all(1 <= n <= 99 for n in (*numbers, target))
        assert reachable(numbers, target)


def test_countdown_number_sets_are_disjoint_between_splits():
    sets = [{tuple(sorted(numbers)) for numbers, _ in countdown(split)} for split in SPLITS]
    assert [len(s) for s in sets] == [2000, 256, 256]
    for a, b in combinations(sets, 2):
        assert not a & b


def two_steps(numbers: tuple[int, ...]) -> set[int]:
    """Targets that three numbers reach, the first two in any order, with all intermediate values whole, 0 to 60."""

    def values(x, y):
        return {v for v in (x + y, x - y, x * y) if v in range(61)}

    return {v for a, b, c in permutations(numbers) for m in values(a, b) for v in values(m, c)} - {0}


def test_pocket_countdown_has_every_target_of_every_set_of_numbers_in_one_split_only():
    problems = {split: countdown(split, "pocket_countdown") for split in SPLITS}
    sets = {split: {numbers for numbers, _ in rows} for split, rows in problems.items()}
    assert [len(found) for found in sets.values()] == [1400, 70, 70]
    assert len(set.union(*sets.values())) == 1540
    for split, rows in problems.items():
        assert len(rows) == len(set(rows))
        assert set(rows) == {(numbers, target) for numbers in sets[split] for target in two_steps(numbers)}
        assert all(20 >= a >= b >= c >= 1 for a, b, c in sets[split])


def arithmetic(split: str) -> list[dict[str, str]]:
    return [json.loads(line) for line in (FOLDER / f"arithmetic_{split}.jsonl").read_text().splitlines()]


def test_arithmetic_answers_are_what_the_words_say():
    signs = {"finds": "+", "buys": "+", "gets": "+", "loses": "-", "sells": "-", "drops": "-"}
    for row in (row for split in SPLITS for row in arithmetic(split)):
        told, *sentences, asked = row["question"].removesuffix("?").split(". ")
        _, _, start, things = told.split()
        assert asked == f"How many {things}"
        amount, lines = int(start), []
        for _, verb, what in map(str.split, sentences):
            sign, k = {"doubles": ("*", 2), "triples": ("*", 3)}.get(verb) or (signs[verb], int(what))
            before = amount
            amount = amount * k if sign == "*" else amount + k if sign == "+" else amount - k
            lines.append(f"{before} {sign} {k} = {amount}")
            assert 10 <= amount <= 99
        assert len(lines) == 3
        assert row["answer"] == "\n".join([*lines, f"#### {amount}"])


def test_arithmetic_numbers_are_disjoint_between_splits():
    def numbers(row):
        lines = [line.split() for line in row["answer"].splitlines()[:3]]
        return lines[0][0], *sorted(line[2] for line in lines)

    rows = {split: arithmetic(split) for split in SPLITS}
    assert [len(found) for found in rows.values()] == [4000, 512, 512]
    assert len({numbers(row) for found in rows.values() for row in found}) == 5024


def test_programs_are_all_functions_each_in_one_split():
    found = []
    for split, count in (("train", 2101), ("validation", 512), ("test", 512)):
        rows = [json.loads(line) for line in (FOLDER / f"programs_{split}.jsonl").read_text().splitlines()]
        assert len(rows) == count
        assert {row["input"] for row in rows} == {"abcde,edcba"}
        found += [row["program"] for row in rows]
    assert sorted(found) == [" + ".join(f"x[{place}]" for place in p) for p in product(range(5), repeat=5)]
