"""SVAMP: the rows of its files, and training rows with new numbers, whose steps Python's own arithmetic repeats."""

from __future__ import annotations

import csv
import json
import os
import re
from fractions import Fraction
from pathlib import Path

import pytest

from d1.tasks import load_task, svamp, under_protocol

COLUMNS = ("Question", "Numbers", "Equation", "Answer")
ROWS = [
    ("Ann has number0 pens and loses number1 . How many ?", "72.0 9.0", "- number0 number1", "63.0"),
    ("number0 boxes of number1 pens , number2 lost .", "4 6 5", "- * number0 number1 number2", "19.0"),
    ("number0 pens for number1 friends , of number2 .", "12 4 7", "/ number0 number1", "3.0"),
    ("A mile costs number0 . How much do number1 ?", "0.5 3", "* number0 number1", "1.5"),
    ("number0 pens in rows of number1 .", "40 7", "/ number0 number1", "5.0"),  # 40/7 is not 5
]
STEP = re.compile(r"(\d+) ([-+*/]) (\d+) = (\d+)")
SIGNS = {"+": Fraction.__add__, "-": Fraction.__sub__, "*": Fraction.__mul__, "/": Fraction.__truediv__}


def write(folder: Path, rows: list[tuple[str, ...]]) -> str:
    path = folder / "train.csv"
    with open(path, "w", newline="") as file:
        csv.writer(file).writerows([COLUMNS, *rows])
    return str(path)


def check_training_rows(rows: list[dict]) -> None:
    """Each step is right, whole and positive, the last is the answer, and no question comes twice."""
    for row in rows:
        question, answer = row["messages"]
        assert "number" not in re.findall(r"number(?=\d)", question["content"])
        *steps, last = answer["content"].splitlines()
        result = last.removeprefix("The answer is ").removesuffix(".")
        for step in filter(None, map(STEP.fullmatch, steps)):
            value = SIGNS[step[2]](Fraction(step[1]), Fraction(step[3]))
            assert value == int(step[4]) > 0
        assert result == (steps[-1].rpartition(" = ")[2] if steps else result)
        assert int(result) > 0
    questions = [row["messages"][0]["content"] for row in rows]
    assert len(set(questions)) == len(questions)


def test_rows_have_the_numbers_in_their_places_and_those_that_contradict_themselves_are_left_out(tmp_path):
    rows = load_task("svamp").load_rows("train", write(tmp_path, ROWS))
    assert rows["question"][:] == [
        "Ann has 72 pens and loses 9 . How many ?",
        "4 boxes of 6 pens , 5 lost .",
        "12 pens for 4 friends , of 7 .",
        "A mile costs 0.5 . How much do 3 ?",
    ]
    assert rows["ground_truth"][:] == [63.0, 19.0, 3.0, 1.5]
    assert rows["solution"][:] == ["72 - 9 = 63", "4 * 6 = 24\n24 - 5 = 19", "12 / 4 = 3", "0.5 * 3 = 1.5"]


def test_lladas_protocol_is_that_of_gsm8k(tmp_path):
    task = under_protocol(load_task("svamp"), "llada")
    row = task.load_rows("test", write(tmp_path, ROWS))[0]
    asked = "Question: Ann has 72 pens and loses 9 . How many ?\nLet's think step by step.\nAnswer:"
    assert row["prompt"] == [{"role": "user", "content": asked}]
    assert task.demonstrate(row) == "72 - 9 = 63\nThe answer is 63."
    assert task.score(task.demonstrate(row), row) == {"accuracy": 1.0}
    assert task.score("72 - 9 = 64\nThe answer is 64.", row) == {"accuracy": 0.0}


def test_training_rows_have_new_numbers_and_right_steps(tmp_path):
    file = write(tmp_path, ROWS)
    rows = list(svamp.training_rows(0, 5, file))
    check_training_rows(rows)
    assert len(rows) == 4 * 5
    assert rows == list(svamp.training_rows(0, 5, file))
    assert rows != list(svamp.training_rows(1, 5, file))
    task = under_protocol(load_task("svamp"), "llada")
    for row in rows:
        answer = row["messages"][1]["content"]
        assert task.extract(answer) == float(answer.split()[-1].removesuffix("."))
    with pytest.raises(ValueError, match="per_problem must be 1 or more, got 0"):
        next(svamp.training_rows(0, 0, file))


def test_the_command_writes_rows_that_sft_reads(tmp_path):
    output = tmp_path / "rows.jsonl"
    flags = [str(output), "--data_file", write(tmp_path, ROWS), "--per_problem", "2", "--seed", "3"]
    svamp.main(svamp.make_parser().parse_args(flags))
    written = [json.loads(line) for line in output.read_text().splitlines()]
    assert written == list(svamp.training_rows(3, 2, str(tmp_path / "train.csv")))


@pytest.mark.parametrize(
    ("row", "message"),
    [
        (("number0 and number2 ?", "1 2", "+ number0 number1", "3"), "row 1: Numbers must have number2, got '1 2'"),
        (("number0 ?", "1 2", "+ number0", "3"), r"row 1: Equation must be in prefix notation, got '\+ number0'"),
        (("number0 ?", "1 2", "number0 + number1", "3"), "row 1: Equation must be in prefix notation"),
        (("number0 ?", "1 x", "+ number0 number1", "3"), "row 1: Numbers must be numbers, got 'x'"),
        (("number0 ?", "1 2", "+ number0 number1", "three"), "row 1: Answer must be numbers, got 'three'"),
        (("number0 ?", "1 2", "+ number0 number1", "1e400"), "row 1: Answer must be numbers, got '1e400'"),
    ],
)
def test_a_wrong_row_is_named(row, message, tmp_path):
    with pytest.raises(ValueError, match=message):
        load_task("svamp").load_rows("test", write(tmp_path, [row]))


def test_a_wrong_row_is_named_by_its_number_in_the_file(tmp_path):
    """Also after a row that contradicts itself, and for training rows."""
    file = write(tmp_path, [ROWS[-1], ("number0 ?", "1 2", "+ number0", "3")])
    for read in (lambda: load_task("svamp").load_rows("test", file), lambda: list(svamp.training_rows(0, 1, file))):
        with pytest.raises(ValueError, match=r"train\.csv, line 3, row 2: Equation must be in prefix notation"):
            read()


@pytest.fixture
def published():
    folder = Path(os.environ.get("D1_FILES", "/nowhere")) / "svamp"
    if not (folder / "train.csv").is_file():
        pytest.skip("D1_FILES names no folder with svamp/train.csv")
    return folder


def test_nine_of_the_published_training_problems_are_left_out_and_no_test_problem(published, monkeypatch):
    monkeypatch.setenv("D1_FILES", str(published.parent))
    task = load_task("svamp")
    assert len(task.load_rows("train", str(published / "train.csv"))) == 3138 - 9
    assert len(task.load_rows("test")) == 1000
    train, validation = (task.load_rows(split)["question"][:] for split in ("train", "validation"))
    plain = [{re.sub("[^a-z]", "", question.lower()) for question in split} for split in (train, validation)]
    assert not plain[0] & plain[1]  # the file has many problems twice, in other letters or with other numbers
    assert len(train) == 2211
    assert len(validation) in range(400, 500)
    for row in task.load_rows("train"):  # also those whose answer the file has rounded
        assert task.score(task.demonstrate(row), row)["accuracy"] == 1
    check_training_rows([row for _, row in zip(range(400), svamp.training_rows(0, 4), strict=False)])
