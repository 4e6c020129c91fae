"""Make the small problem sets of this folder from a seed: python -m dataset.make_problems

Sudoku 4x4: the 288 solution grids are first split 200 / 44 / 44. Then puzzles with six holes and exactly one solution
are drawn from each split, so that no solution of the training split is asked for in validation or test.
Countdown: three numbers from 1 to 99 and a target from 1 to 99 that can be reached by using each number exactly once.
Each set of numbers belongs to one split only.
Pocket Countdown: the 1,540 sets of three numbers from 1 to 20 are split first; each set comes with every target that
the pocket model's two steps can reach.
Arithmetic: word problems of three steps; a start and its three operands belong to one split only.
Programs: the 3,125 functions, each in one split.

With --sealed it writes the problems that are used only for the final table of studies/leaderboard/.
"""

from __future__ import annotations

import argparse
import csv
import json
import random
from fractions import Fraction
from itertools import combinations, combinations_with_replacement, islice
from pathlib import Path

import numpy as np

from d1.runs.cli import run_script
from d1.tasks.arithmetic import LEAST, MOST, after, draw_problem
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
SEALED = 1024


def sudoku_puzzles(solutions: list[str], count: int, grids: list[str], rng: random.Random) -> list[tuple[str, str]]:
    """`count` different (puzzle, solution) pairs; the numbers of puzzles per solution differ by at most one."""
    puzzles: dict[str, str] = {}
    while len(puzzles) < count:
        solution = solutions[len(puzzles) % len(solutions)]
        holes = set(rng.sample(range(16), HOLES))
        puzzle = "".join("0" if i in holes else digit for i, digit in enumerate(solution))
        fitting = sum(all(grid[i] == solution[i] for i in range(16) if i not in holes) for grid in grids)
        if fitting == 1:
            puzzles[puzzle] = solution
    pairs = list(puzzles.items())
    rng.shuffle(pairs)
    return pairs


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


def countdown_problems(splits: dict[str, int], rng: random.Random) -> dict[str, list[dict[str, str]]]:
    """Problems in d1's test schema, e.g. {"input": "30,100,93", "output": "23"}; no set of numbers appears twice."""
    seen: set[tuple[int, ...]] = set()
    problems: dict[str, list[dict[str, str]]] = {split: [] for split in splits}
    for split, count in splits.items():
        while len(problems[split]) < count:
            numbers = [rng.randint(1, 99) for _ in range(3)]
            key = tuple(sorted(numbers))
            targets = sorted(
                v for v in countdown_values([Fraction(n) for n in numbers]) if v.denominator == 1 and 1 <= v < 100
            )
            if key in seen or not targets:
                continue
            seen.add(key)
            target = rng.choice(targets)
            problems[split].append({"input": ",".join(map(str, numbers)), "output": str(target)})
    return problems


def pocket_countdown_problems(splits: dict[str, int], rng: random.Random) -> dict[str, list[dict[str, str]]]:
    """Problems in d1's test schema; `splits` gives the sets of numbers per split; the largest number comes first."""
    sets = [numbers[::-1] for numbers in combinations_with_replacement(range(1, LARGEST_NUMBER + 1), 3)]
    rng.shuffle(sets)
    problems: dict[str, list[dict[str, str]]] = {}
    for split, count in splits.items():
        share, sets = sets[:count], sets[count:]
        pairs = [(numbers, target) for numbers in share for target in {c.value for c in chains(numbers)} if target]
        rng.shuffle(pairs)
        problems[split] = [{"input": ",".join(map(str, numbers)), "output": str(target)} for numbers, target in pairs]
    return problems


def arithmetic_problems(splits: dict[str, int], seed: int) -> dict[str, list[dict[str, str]]]:
    """Problems in GSM8K's schema; `splits` gives their number; no start comes twice with the same operands."""
    rng = np.random.default_rng(seed)
    sets = [(s, *ks) for s in range(LEAST, MOST + 1) for ks in combinations_with_replacement(range(2, 10), 3)]
    numbers = iter(rng.permutation(sets).tolist())
    return {split: [arithmetic_row(*next(numbers), rng=rng) for _ in range(count)] for split, count in splits.items()}


def arithmetic_row(start: int, *operands: int, rng: np.random.Generator) -> dict[str, str]:
    problem = draw_problem(start, operands, rng)
    lines, amount = [], start
    for step in problem.steps:
        before, amount = amount, after(amount, step)
        lines.append(f"{before} {step.sign} {step.operand} = {amount}")
    return {"question": problem.question, "answer": "\n".join([*lines, f"#### {amount}"])}


def program_problems(splits: dict[str, int], rng: random.Random) -> dict[str, list[dict[str, str]]]:
    """Every function of the task in one split, with the same two examples."""
    every = functions()
    drawn = iter(rng.sample(every, len(every)))
    inputs = ",".join(INPUTS)
    return {
        split: [{"input": inputs, "program": program_of(function)} for function in islice(drawn, count)]
        for split, count in splits.items()
    }


def sealed_problems(seed: int) -> dict[str, list[dict[str, str]]]:
    """Task -> 1,024 problems that are in no split, except for Pocket Countdown.

    Arithmetic: other starts with their operands. Sudoku: the splits use all 288 solution grids, so these are other
    puzzles on the grids of the test split, on which no model is trained or tuned. Pocket Countdown: the splits use all
    sets of numbers with all targets, so these are the 475 problems of the test split.
    """
    rng, grids, folder = random.Random(seed), solution_grids(), Path(__file__).parent
    shares = rng.sample(grids, len(grids))  # the same order as in `main`
    drawn = sudoku_puzzles(shares[-SUDOKU_GRIDS["test"] :], 2 * SEALED, grids, random.Random(seed + 1))
    asked = (folder / "sudoku_test.csv").read_text()
    return {
        "sudoku": [{"Puzzle": puzzle, "Solution": grid} for puzzle, grid in drawn if puzzle not in asked][:SEALED],
        "pocket_countdown": pocket_countdown_problems(POCKET_COUNTDOWN_SETS, random.Random(seed))["test"],
        "arithmetic": arithmetic_problems(ARITHMETIC_PROBLEMS | {"sealed": SEALED}, seed)["sealed"],
    }


def write_rows(path: Path, rows: list[dict[str, str]]) -> None:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), newline="\n")


def make_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--output_dir", type=Path, default=Path(__file__).resolve().parent)
    parser.add_argument("--sealed", action="store_true", help="write only the sealed problems")
    return parser


def main(args: argparse.Namespace) -> None:
    args.output_dir.mkdir(parents=True, exist_ok=True)
    if args.sealed:
        for task, rows in sealed_problems(args.seed).items():
            write_rows(args.output_dir / f"{task}.jsonl", rows)
        return
    grids = solution_grids()
    rng = random.Random(args.seed)
    shuffled = rng.sample(grids, len(grids))
    for split, share in SUDOKU_GRIDS.items():
        solutions, shuffled = shuffled[:share], shuffled[share:]
        with open(args.output_dir / f"sudoku_{split}.csv", "w", newline="") as file:
            writer = csv.writer(file, lineterminator="\n")
            writer.writerow(["Puzzle", "Solution"])
            writer.writerows(sudoku_puzzles(solutions, SUDOKU_PUZZLES[split], grids, rng))
    files = {
        "countdown": countdown_problems(COUNTDOWN_PROBLEMS, random.Random(args.seed)),
        "pocket_countdown": pocket_countdown_problems(POCKET_COUNTDOWN_SETS, random.Random(args.seed)),
        "arithmetic": arithmetic_problems(ARITHMETIC_PROBLEMS, args.seed),
        "programs": program_problems(PROGRAMS, random.Random(args.seed)),
    }
    for name, splits in files.items():
        for split, rows in splits.items():
            write_rows(args.output_dir / f"{name}_{split}.jsonl", rows)


if __name__ == "__main__":
    run_script("make_problems.py", lambda: main(make_parser().parse_args()))
