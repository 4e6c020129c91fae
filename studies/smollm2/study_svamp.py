"""SVAMP as the study asks it: word problems (Patel et al., arXiv 2103.07191; MIT licence), without examples.

$D1_FILES/svamp/ has `train.csv` (3,138 problems of MAWPS and ASDiv-A) and `test.csv` (SVAMP's 1,000), as in
arkilpatel/SVAMP: `Question` with number0, number1, ... in place of the numbers, `Numbers`, `Equation` in prefix
notation, `Answer`. The task `svamp` has the reader of files, the signs and the places of numbers. The draw of new
numbers, the order of the steps and the form of numbers are the study's own: its committed results come from these rows.
"""

from __future__ import annotations

import json
import os
import random
import re
from collections.abc import Sequence
from fractions import Fraction
from pathlib import Path
from typing import Any

from datasets import Dataset

from d1.tasks.data import read_file
from d1.tasks.gsm8k import PROTOCOLS, last_number, last_number_reward
from d1.tasks.svamp import COLUMNS, PLACE, SIGNS, Step, fill_numbers

__all__ = ["REWARDS", "extract", "load_rows", "score"]

QUESTION = PROTOCOLS["llada"]["QUESTION"]
REWARDS = [last_number_reward]
MAX_TRIES = 200  # draws of numbers per problem

Problem = dict[str, Any]  # question, solution, ground_truth


def load_rows(split: str, data_file: str | None = None) -> Dataset:
    """Problems of a file that `write_rows` (steps.py) wrote."""
    if data_file is None:
        raise ValueError("this task reads the files of studies.smollm2.run: pass --data_file FILE")
    rows = []
    for line in Path(data_file).read_text().splitlines():
        problem = json.loads(line)
        prompt = [{"role": "user", "content": QUESTION.format(question=problem["question"])}]
        rows.append({"prompt": prompt, **problem})
    return Dataset.from_list(rows)


extract = last_number


def score(text: str, row: dict[str, Any]) -> dict[str, float]:
    number = last_number(text)
    return {"accuracy": float(number is not None and abs(number - row["ground_truth"]) < 1e-4)}


def read_csv(name: str) -> list[dict[str, str]]:
    """The rows of a file of $D1_FILES/svamp. FileNotFoundError says what is missing."""
    folder = os.environ.get("D1_FILES")
    path = Path(folder or "", "svamp", f"{name}.csv")
    if not folder or not path.is_file():
        raise FileNotFoundError(f"no {path}: set D1_FILES to a folder with svamp/train.csv and svamp/test.csv")
    return list(read_file(str(path), COLUMNS))


def computed(equation: str, numbers: Sequence[Fraction]) -> list[Step]:
    """The steps of an equation in prefix notation, those of a left side before those of its right side.

    Raises:
        ZeroDivisionError: a step divides by zero.
    """
    tokens = equation.split()
    steps: list[Step] = []

    def value() -> Fraction:
        token = tokens.pop(0)
        if token not in SIGNS:
            place = PLACE.fullmatch(token)
            return numbers[int(place[1])] if place else Fraction(token)
        left = value()
        right = value()
        steps.append(Step(left, token, right, SIGNS[token](left, right)))
        return steps[-1].result

    value()
    return steps


def written(number: Fraction) -> str:
    """A number as in the problems: "72", "2.5"."""
    return str(number.numerator) if number.denominator == 1 else f"{float(number):.10g}"


def problem_of(row: dict[str, str], numbers: Sequence[Fraction]) -> Problem | None:
    """The problem with these numbers, and its steps as a solution; None if a step is not a positive whole number."""
    try:
        steps = computed(row["Equation"], numbers)
    except ZeroDivisionError:
        return None
    if not steps or any(step.result.denominator != 1 or step.result <= 0 for step in steps):
        return None
    return solved(row, numbers, steps, steps[-1].result)


def own_problem(row: dict[str, str]) -> Problem:
    """A problem with its own numbers and its own answer, which need not be whole."""
    numbers = numbers_of(row)
    return solved(row, numbers, computed(row["Equation"], numbers), Fraction(row["Answer"]))


def solved(row: dict[str, str], numbers: Sequence[Fraction], steps: Sequence[Step], answer: Fraction) -> Problem:
    """The problem with these numbers, with the steps and the answer as its solution."""
    lines = [f"{written(a)} {sign} {written(b)} = {written(result)}" for a, sign, b, result in steps]
    solution = "\n".join([*lines, f"The answer is {written(answer)}."])
    question = tidy(fill_numbers(row["Question"], numbers))
    return {"question": question, "solution": solution, "ground_truth": float(answer)}


def tidy(text: str) -> str:
    """The text without blanks before its marks, which the files have between all words."""
    return re.sub(r" ([.,?!])", r"\1", " ".join(text.split()))


def numbers_of(row: dict[str, str]) -> list[Fraction]:
    return [Fraction(text) for text in row["Numbers"].split()]


def is_consistent(row: dict[str, str]) -> bool:
    """Whether the equation gives the row's answer and every step is a positive whole number."""
    problem = problem_of(row, numbers_of(row))
    return problem is not None and abs(problem["ground_truth"] - float(row["Answer"])) < 1e-4


def with_new_numbers(rows: Sequence[dict[str, str]], per_problem: int, seed: int) -> list[Problem]:
    """`per_problem` problems of each row with numbers of as many digits as its own, whose steps are positive whole
    numbers; fewer where none is found. A function of the seed."""
    rng = random.Random(seed)
    found = []
    for row in rows:
        own = numbers_of(row)
        if any(number.denominator != 1 for number in own):
            continue
        seen: set[str] = set()
        for _ in range(MAX_TRIES):
            if len(seen) == per_problem:
                break
            drawn = [Fraction(drawn_number(int(number), rng)) for number in own]
            problem = problem_of(row, drawn)
            if problem is not None and problem["question"] not in seen:
                seen.add(problem["question"])
                found.append(problem)
    return found


def drawn_number(like: int, rng: random.Random) -> int:
    """A number from 2 with as many digits as `like`; numbers below 2 stay as they are."""
    if like < 2:
        return like
    digits = len(str(like))
    low = 2 if digits == 1 else 10 ** (digits - 1)
    return rng.randint(low, 10**digits - 1)


def as_messages(problem: Problem) -> dict[str, Any]:
    """A row of SFT."""
    question = {"role": "user", "content": QUESTION.format(question=problem["question"])}
    return {"messages": [question, {"role": "assistant", "content": problem["solution"]}]}
