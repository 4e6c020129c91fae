"""The files of dataset/: rebuilt byte for byte, unique, solvable, and never sharing a solution between splits."""

import csv
import importlib.util
import json
from fractions import Fraction
from itertools import pairwise, permutations, product
from pathlib import Path

import pytest

from d1.models.tokenizer import encode_prompt, end_ids, render_prompt, trained_ids
from d1.runs.turns import TurnSettings
from d1.tools.functions import calculator
from d1.tools.turns import Episode, Toolbox
from pocket.tokenizer import build_tokenizer

FOLDER = Path(__file__).resolve().parents[3] / "dataset"
SPLITS = ("train", "validation", "test")


def read(name: str, split: str) -> list[dict[str, str]]:
    with open(next(FOLDER.glob(f"{name}_{split}.*")), newline="") as file:
        return list(csv.DictReader(file)) if name == "sudoku" else [json.loads(line) for line in file]


def countdown(split: str, name: str = "countdown") -> list[tuple[tuple[int, ...], int]]:
    return [(tuple(map(int, row["input"].split(","))), int(row["output"])) for row in read(name, split)]


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
    lines = (
        f"{name}_{split}.jsonl"
        for name in ("countdown", "pocket_countdown", "arithmetic", "programs", "products")
        for split in SPLITS
    )
    sudoku = (f"sudoku_{split}.csv" for split in SPLITS)
    assert [path.name for path in made] == sorted([*sudoku, *lines, "products_sft.jsonl"])
    for path in made:
        assert path.read_bytes() == (FOLDER / path.name).read_bytes(), path.name
    script.main(script.make_parser().parse_args(["--output_dir", str(tmp_path), "--seed", "1"]))
    assert (tmp_path / "sudoku_test.csv").read_bytes() != (FOLDER / "sudoku_test.csv").read_bytes()


def key(name: str, row: dict[str, str]) -> object:
    """What no two splits may share."""
    if name == "arithmetic":  # the numbers of a problem
        lines = [line.split() for line in row["answer"].splitlines()[:3]]
        return lines[0][0], *sorted(line[2] for line in lines)
    if name == "products":
        return tuple(sorted(row["input"].split(" * ")))
    return row["Solution"] if name == "sudoku" else tuple(sorted(row["input"].split(",")))


@pytest.mark.parametrize(
    ("name", "rows", "keys"),
    [
        ("sudoku", [4000, 512, 512], [200, 44, 44]),  # all 288 grids
        ("countdown", [2000, 256, 256], [2000, 256, 256]),
        ("arithmetic", [4000, 512, 512], [4000, 512, 512]),
        ("products", [4000, 512, 512], [4000, 512, 512]),
    ],
)
def test_splits_are_unique_and_disjoint(name, rows, keys):
    found = [read(name, split) for split in SPLITS]
    assert [len({*map(str, some)}) for some in found] == [len(some) for some in found] == rows
    sets = [{key(name, row) for row in some} for some in found]
    assert [len(some) for some in sets] == keys
    assert len(set.union(*sets)) == sum(keys)


@pytest.mark.parametrize("split", SPLITS)
def test_sudoku_puzzles_have_six_holes_and_one_solution(split):
    for row in read("sudoku", split):
        assert row["Puzzle"].count("0") == 6
        assert solutions([int(c) for c in row["Puzzle"]]) == [[int(c) for c in row["Solution"]]]


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


@pytest.mark.parametrize("split", SPLITS)
def test_countdown_problems_can_be_solved(split):
    for numbers, target in countdown(split):
        assert len(numbers) == 3
        assert all(1 <= n <= 99 for n in (*numbers, target))
        assert reachable(numbers, target)


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


def test_arithmetic_answers_are_what_the_words_say():
    signs = {"finds": "+", "buys": "+", "gets": "+", "loses": "-", "sells": "-", "drops": "-"}
    for row in (row for split in SPLITS for row in read("arithmetic", split)):
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


def test_programs_are_all_functions_each_in_one_split():
    found = []
    for split, count in (("train", 2101), ("validation", 512), ("test", 512)):
        rows = read("programs", split)
        assert len(rows) == count
        assert {row["input"] for row in rows} == {"abcde,edcba"}
        found += [row["program"] for row in rows]
    assert sorted(found) == [" + ".join(f"x[{index}]" for index in p) for p in product(range(5), repeat=5)]


def test_products_are_right_and_their_conversations_are_ids_of_rollouts():
    """What SFT learns from ends as an episode of these problems continues, token by token."""
    for row in (row for split in SPLITS for row in read("products", split)):
        a, b = map(int, row["input"].split(" * "))
        assert a * b == int(row["output"])
        assert all(100 <= factor <= 999 for factor in (a, b))
    shown = [json.loads(line)["messages"] for line in (FOLDER / "products_sft.jsonl").read_text().splitlines()]
    assert [len(messages) for messages in shown].count(4) == 250
    tokenizer = build_tokenizer("products")
    box = Toolbox(tokenizer, end_ids(tokenizer), TurnSettings())
    functions = {"calculator": calculator}
    for first, second in [pair for pair in pairwise(shown) if len(pair[1]) == 4][:20]:
        prompt, _ = box.add_tool_instructions(first[:1], functions)
        start = encode_prompt(tokenizer, render_prompt(tokenizer, prompt))
        turns = [trained_ids(messages, tokenizer, "answer") for messages in (first, second)]
        written = [ids[begins:] for ids, begins in turns]
        episode = Episode(prompt, start, functions)
        box.run_episodes([episode], lambda rows, turn, written=written: [written[turn]])
        assert [*start, *episode.ids] == turns[1][0]
        assert [turn.prompt_ids for turn in episode.turns] == [ids[:begins] for ids, begins in turns]
