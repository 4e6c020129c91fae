r"""The verdicts of MATH and GSM8K on answers in the formats that models write.

`tests/real_files/answers_pairs.tsv` has golds, answers and verdicts. `answers_formats.tsv` has formats and near misses,
in which each gold is given back: those of `answers_golds.tsv`, and with `D1_FILES` all of GSM8K, SVAMP and MATH-500.
"""

from __future__ import annotations

import csv
import json
import os
import re
from collections.abc import Callable
from functools import cache
from pathlib import Path

import pytest

from d1.tasks import gsm8k, math500

TABLES = Path(__file__).resolve().parents[2] / "real_files"
CODE_POINT = re.compile(r"<U\+([0-9A-F]{4})>")
INTEGER, FRACTION = re.compile("-?[0-9]+"), re.compile(r"(-?)\\[dt]?frac\{?([0-9])\}?\{?([0-9])\}?")
BASE = re.compile(r"([0-9]+)_\{?([0-9])\}?")


def read_table(name: str) -> list[list[str]]:
    lines = (TABLES / name).read_text(encoding="utf-8").splitlines()
    rows = [line.split("\t") for line in lines if line and not line.startswith("#")]
    return [[CODE_POINT.sub(lambda code: chr(int(code[1], 16)), cell) for cell in row] for row in rows]


FORMATS, PAIRS = read_table("answers_formats.tsv"), read_table("answers_pairs.tsv")


def other(gold: str) -> str | None:
    """The gold with its last digit changed."""
    last = re.search("[0-9](?=[^0-9]*$)", gold)
    return last and f"{gold[: last.start()]}{int(last[0]) % 9 + 1}{gold[last.end() :]}"


def groups(gold: str, separator: str) -> str:
    return f"{int(gold):,}".replace(",", separator)


def fraction(form: str) -> Callable[[str], str]:
    return lambda gold: FRACTION.sub(form, gold)


KINDS: dict[str, Callable[[str], object]] = {
    "any": lambda gold: True,
    "integer": INTEGER.fullmatch,
    "positive": lambda gold: INTEGER.fullmatch(gold) and int(gold) > 2,  # for 1 and 2, 2! and 1^2 are no near misses
    "large": lambda gold: INTEGER.fullmatch(gold) and abs(int(gold)) >= 1000,
    "negative": lambda gold: re.fullmatch(r"-[0-9.]+", gold),
    "fraction": lambda gold: FRACTION.fullmatch(gold) and len({*FRACTION.fullmatch(gold).groups()[1:]}) > 1,
    "base": BASE.fullmatch,
}
FORMS: dict[str, Callable[[str], str | None]] = {  # what stands for <NAME> in a format
    "gold": lambda gold: gold,
    "other": other,
    "absolute": lambda gold: gold.removeprefix("-"),
    "full-width": lambda gold: "".join(chr(ord(sign) + 0xFEE0) for sign in gold),
    "short fraction": fraction(r"\1\\frac\2\3"),
    "d fraction": fraction(r"\1\\dfrac{\2}{\3}"),
    "upside down": fraction(r"\1\\frac{\3}{\2}"),
    "without base": lambda gold: BASE.sub(r"\1", gold),
    "other base": lambda gold: BASE.sub(lambda number: f"{number[1]}_{int(number[2]) + 1}", gold),
}


def in_format(gold: str, form: str) -> str | None:
    """The gold in a format; None if it has no such form."""
    for name in re.findall(r"<([a-z][a-z -]*)>", form):
        text = FORMS[name](gold)
        if text is None:
            return None
        form = form.replace(f"<{name}>", text)
    return re.sub(r"<groups:(.+?)>", lambda match: groups(gold, match[1]), form)


def verdict(task: str, answer: str, gold: str) -> float:
    module, truth = {"gsm8k": (gsm8k, gsm8k.gold_number(gold)), "math": (math500, gold)}[task]
    assert truth is not None, gold
    return module.score(f"<reasoning>7</reasoning><answer>{answer}</answer>", {"ground_truth": truth})["accuracy"]


@cache
def golds_of(task: str, source: str) -> list[str]:
    if source == "own":
        return [gold for name, gold in read_table("answers_golds.tsv") if name == task]
    folder = os.environ.get("D1_FILES")
    if not folder:
        pytest.skip("D1_FILES is not set")
    golds: set[str] = set()
    if task == "math":
        for path in Path(folder).glob("d1_generations/math500*.json"):
            golds.update(item["ground_truth"] for item in json.loads(path.read_text())["generations"])
    else:
        for path in Path(folder).glob("gsm8k/*.jsonl"):
            for line in path.read_text().splitlines():
                golds.add(json.loads(line)["answer"].rpartition("####")[2].strip().replace(",", ""))
        for path in Path(folder).glob("svamp/*.csv"):
            with open(path, newline="", encoding="utf-8") as rows:
                golds.update(f"{float(row['Answer']):.6f}".rstrip("0").rstrip(".") for row in csv.DictReader(rows))
    if not golds:
        pytest.skip(f"{folder} has no golds of {task}")
    return sorted(golds)


@pytest.mark.parametrize(("task", "gold", "answer", "right"), PAIRS, ids=lambda cell: ascii(cell)[1:-1])
def test_verdicts_on_pairs(task, gold, answer, right):
    assert verdict(task, answer, gold) == float(right)


@pytest.mark.parametrize("source", ["own", "published"])
@pytest.mark.parametrize(
    ("task", "kind", "form", "right"),
    [(task, kind, form, right) for tasks, kind, form, _, right in FORMATS for task in tasks.split(",")],
    ids=lambda cell: ascii(cell)[1:-1],
)
def test_each_gold_is_right_in_each_format_and_each_near_miss_is_wrong(source, task, kind, form, right):
    wrong = []
    for gold in filter(KINDS[kind], golds_of(task, source)):
        answer = in_format(gold, form)
        if answer is not None and verdict(task, answer, gold) != float(right):
            wrong.append((gold, answer))
    assert not wrong, f"{len(wrong)} verdicts are not {right}: {wrong[:10]}"


def test_the_tables_have_formats_and_near_misses_of_both_tasks():
    for task in ("gsm8k", "math"):
        for near_miss, least in (("no", 30), ("yes", 10)):
            assert len([row for row in FORMATS if task in row[0] and row[3] == near_miss]) >= least
