"""Make the small problem sets of this folder from a seed: python -m dataset.make_problems

Sudoku 4x4: the 288 solution grids are first split 200 / 44 / 44. Then puzzles with six holes and exactly one solution
are drawn from each split, so that no solution of the training split is asked for in validation or test.
Countdown: three numbers from 1 to 99 and a target from 1 to 99 that can be reached by using each number exactly once.
Each set of numbers belongs to one split only.
Pocket Countdown: the 1,540 sets of three numbers from 1 to 20 are split first; each set comes with every target that
the pocket model's two steps can reach.
Arithmetic: word problems of three steps; a start and its three operands belong to one split only.
Programs: the 3,125 functions, each in one split.
Products: two numbers of three digits; a pair belongs to one split only. The SFT set has conversations for the first
training problems: a quarter of them call a calculator, the others answer at once.
"""

from __future__ import annotations

import argparse
import json
import random
from collections.abc import Iterator, Sequence
from fractions import Fraction
from itertools import combinations, combinations_with_replacement, islice
from pathlib import Path
from typing import Any

import numpy as np

from d1.runs.cli import run_script
from d1.tasks import products
from d1.tasks.arithmetic import MAX_AMOUNT, MIN_AMOUNT, after, draw_problem
from d1.tasks.pocket_countdown import LARGEST_NUMBER, chains
from d1.tasks.programs import INPUTS, functions, program_of
from d1.tasks.sudoku import solution_grids

HOLES = 6
SUDOKU_GRIDS = {"train": 200, "validation": 44, "test": 44}
SUDOKU_PUZZLES = {"train": 4000, "validation": 512, "test": 512}
COUNTDOWN_PROBLEMS = {"train": 2000, "validation": 256, "test": 256}
POCKET_COUNTDOWN_SETS = {"train": 1400, "validation": 70, "test": 70}
ARITHMETIC_PROBLEMS = {"train": 4000, "validation": 512, "test": 512}
PROGRAMS = {"train": 2101, "validation": 512, "test": 512}
PRODUCTS = {"train": 4000, "validation": 512, "test": 512}
SHOWN = 1000  # training problems in the SFT set of products
WITH_CALL = 4  # every fourth of them has a call
Row = dict[str, str]


def sudoku_puzzles(solutions: list[str], count: int, grids: list[str], rng: random.Random) -> list[Row]:
    """`count` different puzzles with their solutions; the numbers of puzzles per solution differ by at most one."""
    puzzles: dict[str, str] = {}
    while len(puzzles) < count:
        solution = solutions[len(puzzles) % len(solutions)]
        holes = set(rng.sample(range(16), HOLES))
        puzzle = "".join("0" if i in holes else digit for i, digit in enumerate(solution))
        fitting = sum(all(grid[i] == solution[i] for i in range(16) if i not in holes) for grid in grids)
        if fitting == 1:
            puzzles[puzzle] = solution
    rows = [{"Puzzle": puzzle, "Solution": solution} for puzzle, solution in puzzles.items()]
    rng.shuffle(rows)
    return rows


def countdown_values(numbers: list[Fraction]) -> set[Fraction]:
    """Every value that + - * / and parentheses can make from `numbers`, each used exactly once."""
    if len(numbers) == 1:
        return {numbers[0]}
    values: set[Fraction] = set()
    for i, j in combinations(range(len(numbers)), 2):
        a, b = numbers[i], numbers[j]
        rest = [n for k, n in enumerate(numbers) if k not in (i, j)]
        results = {a + b, a - b, b - a, a * b} | ({a / b} if b else set()) | ({b / a} if a else set())
        for result in results:
            values |= countdown_values([*rest, result])
    return values


def countdown_row(numbers: tuple[int, ...], target: int | Fraction) -> Row:
    """A problem in d1's test schema, e.g. {"input": "30,100,93", "output": "23"}."""
    return {"input": ",".join(map(str, numbers)), "output": str(target)}


def countdown_problems(rng: random.Random) -> Iterator[Row]:
    """Problems without end; no set of numbers appears twice."""
    seen: set[tuple[int, ...]] = set()
    while True:
        numbers = tuple(rng.randint(1, 99) for _ in range(3))
        key = tuple(sorted(numbers))
        values = countdown_values([Fraction(n) for n in numbers])
        targets = sorted(value for value in values if value.denominator == 1 and 1 <= value < 100)
        if targets and key not in seen:
            seen.add(key)
            yield countdown_row(numbers, rng.choice(targets))


def pocket_countdown_problems(rng: random.Random) -> dict[str, list[Row]]:
    """Each split's sets of numbers, the largest number first, with all their targets."""
    sets = [numbers[::-1] for numbers in combinations_with_replacement(range(1, LARGEST_NUMBER + 1), 3)]
    rng.shuffle(sets)
    rest, problems = iter(sets), {}
    for split, count in POCKET_COUNTDOWN_SETS.items():
        share = islice(rest, count)
        pairs = [(numbers, target) for numbers in share for target in {c.value for c in chains(numbers)} if target]
        rng.shuffle(pairs)
        problems[split] = [countdown_row(*pair) for pair in pairs]
    return problems


def arithmetic_problems(seed: int, steps: int = 3) -> Iterator[Row]:
    """Problems in GSM8K's schema; no start comes twice with the same operands."""
    rng = np.random.default_rng(seed)
    sets = [
        (s, *ks) for s in range(MIN_AMOUNT, MAX_AMOUNT + 1) for ks in combinations_with_replacement(range(2, 10), steps)
    ]
    for numbers in rng.permutation(sets).tolist():
        yield arithmetic_row(*numbers, rng=rng)


def arithmetic_row(start: int, *operands: int, rng: np.random.Generator) -> Row:
    problem, amount, lines = draw_problem(start, operands, rng), start, []
    for step in problem.steps:
        before, amount = amount, after(amount, step)
        lines.append(f"{before} {step.sign} {step.operand} = {amount}")
    return {"question": problem.question, "answer": "\n".join([*lines, f"#### {amount}"])}


def program_problems(rng: random.Random) -> Iterator[Row]:
    """Every function of the task, with the same two examples."""
    every = functions()
    for function in rng.sample(every, len(every)):
        yield {"input": ",".join(INPUTS), "program": program_of(function)}


def product_problems(rng: random.Random) -> Iterator[Row]:
    """Every pair of factors at most once, in either order."""
    seen: set[tuple[int, ...]] = set()
    while True:
        pair = tuple(rng.randint(products.MIN_FACTOR, products.MAX_FACTOR) for _ in range(2))
        if (key := tuple(sorted(pair))) not in seen:
            seen.add(key)
            yield {"input": f"{pair[0]} * {pair[1]}", "output": str(pair[0] * pair[1])}


def product_calls(rows: list[Row]) -> Iterator[dict[str, list[products.Message]]]:
    """Conversations of SFT for these problems."""
    for number, row in enumerate(rows):
        shown = products.calls(row["input"], int(row["output"]), with_tool=number % WITH_CALL == 0)
        yield from ({"messages": messages} for messages in shown)


def splits_of(rows: Iterator[Row], counts: dict[str, int]) -> dict[str, list[Row]]:
    return {split: [*islice(rows, count)] for split, count in counts.items()}


def write_rows(path: Path, rows: Sequence[dict[str, Any]]) -> None:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), newline="\n")


def make_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--output_dir", type=Path, default=Path(__file__).resolve().parent)
    return parser


def main(args: argparse.Namespace) -> None:
    args.output_dir.mkdir(parents=True, exist_ok=True)
    grids, rng = solution_grids(), random.Random(args.seed)
    shuffled = iter(rng.sample(grids, len(grids)))
    for split, share in SUDOKU_GRIDS.items():
        puzzles = sudoku_puzzles([*islice(shuffled, share)], SUDOKU_PUZZLES[split], grids, rng)
        lines = ["Puzzle,Solution", *(",".join(row.values()) for row in puzzles)]
        (args.output_dir / f"sudoku_{split}.csv").write_text("\n".join(lines) + "\n", newline="\n")
    files = {
        "countdown": splits_of(countdown_problems(random.Random(args.seed)), COUNTDOWN_PROBLEMS),
        "pocket_countdown": pocket_countdown_problems(random.Random(args.seed)),
        "arithmetic": splits_of(arithmetic_problems(args.seed), ARITHMETIC_PROBLEMS),
        "programs": splits_of(program_problems(random.Random(args.seed)), PROGRAMS),
        "products": splits_of(product_problems(random.Random(args.seed)), PRODUCTS),
    }
    for name, splits in files.items():
        for split, rows in splits.items():
            write_rows(args.output_dir / f"{name}_{split}.jsonl", rows)
    shown = product_calls(files["products"]["train"][:SHOWN])
    write_rows(args.output_dir / "products_sft.jsonl", [*shown])


if __name__ == "__main__":
    run_script("make_problems.py", lambda: main(make_parser().parse_args()))
