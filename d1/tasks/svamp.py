"""SVAMP: word problems of one or two steps whose answer is one number (arXiv 2103.07191, columns `Question`, `Numbers`,
`Equation`, `Answer`).

The training problems are those of MAWPS and ASDiv-A, the test problems SVAMP's own. Their texts have `number0`,
`number1`, ... for the numbers, and equations in prefix notation, so new numbers make new problems with known answers:

    python -m d1.tasks.svamp rows.jsonl --per_problem 4 --seed 0

writes rows for SFT under the protocol "llada", with the steps of each problem. Rewards, metric and the extraction of
answers are those of GSM8K.
"""

from __future__ import annotations

import argparse
import json
import logging
import math
import os
import random
import re
import sys
from collections.abc import Iterator, Sequence
from fractions import Fraction
from pathlib import Path
from typing import Any, NamedTuple

from datasets import Dataset

from d1.tasks import problem
from d1.tasks.data import NUMBER, check_split, hold_out, read_file, read_problems, task_rows, text_in
from d1.tasks.gsm8k import ANSWER, INSTRUCTIONS, PROTOCOLS, REWARDS, demonstrate, extract, score

__all__ = ["PROTOCOLS", "REWARDS", "demonstrate", "extract", "load_rows", "score", "training_rows"]

logger = logging.getLogger(__name__)

HUB = "ChilleD/SVAMP"
COLUMNS = ("Question", "Numbers", "Equation", "Answer")
HUB_COLUMNS = ("Body", "Question", "Equation", "Answer")
ROUNDING = 1e-3  # answers are rounded: the largest difference from the value of the equation, relative
DRAWS = 300  # of new numbers, before a problem is left without more rows
PLACE = re.compile(r"\bnumber(\d+)\b")
SIGNS = {"+": Fraction.__add__, "-": Fraction.__sub__, "*": Fraction.__mul__, "/": Fraction.__truediv__}


class Template(NamedTuple):
    """`text` and `equation` have `number0`, `number1`, ... in place of `numbers`."""

    text: str
    equation: str
    numbers: list[Fraction]


class Step(NamedTuple):
    left: Fraction
    sign: str
    right: Fraction
    result: Fraction


def load_rows(split: str, data_file: str | None = None) -> Dataset:
    """SVAMP from `data_file`, else from `svamp/` in the folder that `$D1_FILES` names, else from the hub.

    The hub's copy (`ChilleD/SVAMP`) has SVAMP's own problems alone, 700 and 300, with numbers in their texts. Training
    problems whose equation does not give their answer (9 of 3,138) are left out. In the folder, those whose text
    comes twice count once, before the validation split is taken from them; that split has no problem whose text is that
    of a training problem up to its numbers, case and punctuation.
    """
    source, rows = _read_rows(split, data_file)
    if "Numbers" not in rows.column_names:
        return task_rows(source, rows, _hub_row, NUMBER)
    problems, _ = _consistent_problems(source, rows)
    return problems


def _read_rows(split: str, data_file: str | None) -> tuple[str, Dataset]:
    """The source's name and its rows."""
    check_split(split)
    folder = os.environ.get("D1_FILES")
    if not data_file and folder:
        path = Path(folder) / "svamp" / ("test.csv" if split == "test" else "train.csv")
        if path.is_file():
            rows = read_file(str(path), COLUMNS)
            if split != "test":  # one text twice, with other numbers, would be in training and validation
                first_indices: dict[str, int] = {}
                for index, text in enumerate(rows["Question"]):
                    first_indices.setdefault(text, index)
                rows = rows.select(list(first_indices.values()))
            split_rows = hold_out(rows, split)
            if split == "validation":
                known = {_letters(text) for text in hold_out(rows, "train")["Question"]}
                texts = [_letters(text) for text in split_rows["Question"]]
                split_rows = split_rows.select([index for index, text in enumerate(texts) if text not in known])
            return str(path), split_rows
    return read_problems(split, data_file, (HUB, None), (HUB, None), COLUMNS, HUB_COLUMNS)


def _letters(text: str) -> str:
    """The letters and digits of a text, in lower case."""
    return re.sub(r"[^a-z0-9]", "", text.lower())


def _consistent_problems(source: str, rows: Dataset) -> tuple[Dataset, list[int]]:
    """The problems of the rows whose equation gives their answer, and the indices of these rows. ValueError for a row
    that cannot be read."""
    problems = task_rows(source, rows, _task_row, NUMBER)
    consistent = [index for index, row in enumerate(rows) if not _contradicts_itself(row)]
    excluded = len(rows) - len(consistent)
    if excluded:
        logger.info("%s: %d of %d rows do not give their own answer, left out", source, excluded, len(rows))
    return problems.select(consistent), consistent


def _contradicts_itself(row: dict[str, Any]) -> bool:
    template = _template(row)
    _, value = _solve(template.equation, template.numbers)
    answer = _number(row["Answer"], "Answer")
    return value is None or not math.isclose(value, answer, rel_tol=ROUNDING)


def _task_row(row: dict[str, Any]) -> dict[str, Any]:
    template = _template(row)
    steps, value = _solve(template.equation, template.numbers)
    question = fill_numbers(template.text, template.numbers)
    answer = _number(row["Answer"], "Answer")
    if value is not None and math.isclose(value, answer, rel_tol=ROUNDING):
        answer = value  # the file's is rounded, and a completion has to give the value
    return problem(question, INSTRUCTIONS, ANSWER, float(answer), solution=_format_steps(steps))


def _hub_row(row: dict[str, Any]) -> dict[str, Any]:
    question = f"{text_in(row, 'Body').strip()} {text_in(row, 'Question').strip()}"
    answer = _number(row["Answer"], "Answer")
    equation = re.sub(r"(?<=[0-9])\.0(?![0-9])", "", text_in(row, "Equation").strip())  # in brackets: ( 8.0 - 3.0 )
    solution = f"{equation.removeprefix('(').removesuffix(')').strip()} = {_format_number(answer)}"
    return problem(question, INSTRUCTIONS, ANSWER, float(answer), solution=solution)


def _template(row: dict[str, Any]) -> Template:
    """Raises ValueError if the text or the equation names a number that the row lacks, or the equation is none."""
    numbers = [_number(text, "Numbers") for text in str(row["Numbers"]).split()]
    template = Template(text_in(row, "Question"), text_in(row, "Equation"), numbers)
    indices = [int(placeholder) for placeholder in PLACE.findall(f"{template.text} {template.equation}")]
    if max(indices, default=-1) >= len(numbers):
        raise ValueError(f"Numbers must have number{max(indices)}, got {row['Numbers']!r}")
    _solve(template.equation, numbers)
    return template


def _number(value: Any, column: str) -> Fraction:
    try:
        number = Fraction(str(value).strip())
        float(number)  # too large a number is an OverflowError
    except (ValueError, ZeroDivisionError, OverflowError):
        raise ValueError(f"{column} must be numbers, got {value!r}") from None
    return number


def _format_number(number: Fraction) -> str:
    return f"{float(number):.15g}"


def fill_numbers(text: str, numbers: Sequence[Fraction]) -> str:
    """The text with the numbers in their places."""
    return PLACE.sub(lambda placeholder: _format_number(numbers[int(placeholder[1])]), text)


def _solve(equation: str, numbers: Sequence[Fraction]) -> tuple[list[Step], Fraction | None]:
    """The steps of an equation in prefix notation and its value, None for a division by zero.

    Raises:
        ValueError: it is no equation.
    """
    steps: list[Step] = []
    values: list[Fraction] = []
    for token in reversed(equation.split()):
        placeholder = PLACE.fullmatch(token)
        if placeholder:
            values.append(numbers[int(placeholder[1])])
        elif token not in SIGNS:
            values.append(_number(token, "Equation"))
        elif len(values) < 2:
            raise ValueError(f"Equation must be in prefix notation, got {equation!r}")
        else:
            left = values.pop()
            right = values.pop()
            if token == "/" and right == 0:
                return steps, None
            values.append(SIGNS[token](left, right))
            steps.append(Step(left, token, right, values[-1]))
    if len(values) != 1:
        raise ValueError(f"Equation must be in prefix notation, got {equation!r}")
    return steps, values[0]


def _format_steps(steps: Sequence[Step]) -> str:
    """The steps as lines such as "72 - 9 = 63"."""
    lines = []
    for left, sign, right, result in steps:
        lines.append(f"{_format_number(left)} {sign} {_format_number(right)} = {_format_number(result)}")
    return "\n".join(lines)


def training_rows(seed: int, per_problem: int, data_file: str | None = None) -> Iterator[dict[str, Any]]:
    """Rows for SFT: `messages` with a training problem with new numbers, and its steps and answer.

    The numbers are whole and between half and twice the originals (up to 10 at least). They are drawn so that all
    results are whole and positive. No question comes twice; a problem with few such numbers has fewer rows.

    Args:
        seed: of the numbers.
        per_problem: rows per training problem.
        data_file: a file with the columns `COLUMNS`; by default the training split of `load_rows`.

    Raises:
        ValueError: `per_problem` is less than 1, the data have no `Numbers`, or a row cannot be read.
    """
    if per_problem < 1:
        raise ValueError(f"per_problem must be 1 or more, got {per_problem}")
    source, rows = _read_rows("train", data_file)
    if "Numbers" not in rows.column_names:
        raise ValueError(
            f"{source} has no column Numbers: set D1_FILES to a folder with svamp/train.csv, or pass a file"
        )
    _, indices = _consistent_problems(source, rows)
    rng = random.Random(seed)
    question = PROTOCOLS["llada"]["QUESTION"]
    demonstrate_plainly = PROTOCOLS["llada"]["demonstrate"]
    questions = set()
    for index in indices:
        template = _template(rows[index])
        count = 0
        for _ in range(DRAWS):
            numbers = _new_numbers(template.numbers, rng)
            text = fill_numbers(template.text, numbers)
            solution = _whole_steps(template.equation, numbers)
            if solution is None or text in questions:
                continue
            questions.add(text)
            steps, value = solution
            answer = demonstrate_plainly({"solution": _format_steps(steps), "ground_truth": float(value)})
            user = {"role": "user", "content": question.format(question=text)}
            assistant = {"role": "assistant", "content": answer.strip()}
            yield {"messages": [user, assistant]}
            count += 1
            if count == per_problem:
                break


def _new_numbers(numbers: Sequence[Fraction], rng: random.Random) -> list[Fraction]:
    new_numbers = []
    for number in numbers:
        low = max(1, int(number / 2))
        high = max(10, int(2 * number))
        new_numbers.append(Fraction(rng.randint(low, high)))
    return new_numbers


def _whole_steps(equation: str, numbers: Sequence[Fraction]) -> tuple[list[Step], Fraction] | None:
    """The steps and the value, if all results are whole and positive."""
    steps, value = _solve(equation, numbers)
    if value is None:
        return None
    for result in [value, *(step.result for step in steps)]:
        if result <= 0 or result.denominator != 1:
            return None
    return steps, value


def make_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m d1.tasks.svamp", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("output_file", type=Path, help="the rows, as jsonl")
    parser.add_argument("--data_file", help="a csv file with the columns of SVAMP; default: the training split")
    parser.add_argument("--per_problem", type=int, default=4, help="rows per problem (default 4)")
    parser.add_argument("--seed", type=int, default=0)
    return parser


def main(args: argparse.Namespace) -> None:
    rows = training_rows(args.seed, args.per_problem, args.data_file)
    args.output_file.write_text("".join(json.dumps(row) + "\n" for row in rows), newline="\n")


if __name__ == "__main__":
    try:
        main(make_parser().parse_args())
    except (ValueError, OSError) as error:
        sys.exit(f"python -m d1.tasks.svamp: {error}")
