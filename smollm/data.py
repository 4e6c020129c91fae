"""The problems of `make smollm`: where they are read from, and the rows of SFT.

    python -m smollm.data rows.jsonl --task svamp

Prompts and answers are those of the protocol `llada`: "Question: ... Answer:" -> "72 - 9 = 63\nThe answer is 63."
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from d1.files import write_atomically
from d1.ranges import COUNT
from d1.runs.cli import OneLineParser, run_script
from d1.tasks import load_task, svamp, under_protocol

ROOT = Path(__file__).resolve().parents[1]
PROTOCOL = "llada"
PER_PROBLEM = 4  # rows with new numbers per problem of SVAMP


@dataclass(frozen=True)
class Problems:
    """Where the problems of a task are read from; None: where the task looks for them itself.

    Attributes:
        task: its name in d1's TASKS.
        rows: number of rows of SFT, for the estimate of hours; so are the next two.
        prompt: mean tokens of a prompt, with those of the chat template.
        answer: mean tokens of an answer.
        completion: tokens of the canvas, enough for nearly all solutions.
        max_length: tokens of a row of SFT, enough for all of them.
    """

    task: str
    rows: int
    prompt: int
    answer: int
    train_file: str | None = None
    test_file: str | None = None
    completion: int = 48
    max_length: int = 256


def problems_of(name: str) -> Problems:
    """The problems of an entry of `NAMES`."""
    if name == "words":
        train, test = (os.path.relpath(ROOT / "dataset" / f"arithmetic_{split}.jsonl") for split in ("train", "test"))
        return Problems("gsm8k", rows=4000, prompt=69, answer=39, train_file=train, test_file=test)
    if name == "svamp":
        return Problems("svamp", rows=8737, prompt=80, answer=23)
    sizes: dict[str, Any] = {"rows": 7473, "prompt": 102, "answer": 99, "completion": 160, "max_length": 512}
    folder = Path(os.environ.get("D1_FILES", "")) / "gsm8k"
    train, test = (str(folder / f"{split}.jsonl") for split in ("train", "test"))
    if os.environ.get("D1_FILES") and os.path.isfile(train) and os.path.isfile(test):
        return Problems("gsm8k", **sizes, train_file=train, test_file=test)
    return Problems("gsm8k", **sizes)


NAMES = ("svamp", "gsm8k", "words")  # in the order in which they are tried
FILES = {  # of the tasks that can also be read from the hub, in the folder that D1_FILES names
    "svamp": "svamp/train.csv and svamp/test.csv",
    "gsm8k": "gsm8k/train.jsonl and gsm8k/test.jsonl",
}


def check_readable(name: str) -> None:
    """Raises OSError if the training or the test problems of an entry of `NAMES` cannot be read."""
    problems = problems_of(name)
    task = load_task(problems.task)
    try:
        task.load_rows("train", problems.train_file)
        task.load_rows("test", problems.test_file)
    except (OSError, ValueError) as error:
        reason = " ".join(str(error).split()).partition(". To use a local")[0]  # which names a flag of other commands
        hint = f"; set D1_FILES to a folder with {FILES[name]}" if name in FILES else ""
        raise OSError(f"{name} cannot be read: {reason}{hint}") from error


def first_readable() -> tuple[str, list[str]]:
    """The first of `NAMES` whose problems can be read, and why those before it cannot."""
    faults: list[str] = []
    for name in NAMES:
        try:
            check_readable(name)
        except OSError as error:
            faults.append(str(error))
            continue
        return name, faults
    raise OSError("; ".join(faults))


def sft_rows(problems: Problems, seed: int = 0) -> Iterator[dict[str, Any]]:
    """Rows with `messages`: SVAMP's training problems with new numbers, or the training problems as they are."""
    if problems.task == "svamp":
        try:
            yield from svamp.training_rows(seed, PER_PROBLEM, problems.train_file)
            return
        except ValueError as error:
            if "has no column Numbers" not in str(error):  # as the hub's copy
                raise
    task = under_protocol(load_task(problems.task), PROTOCOL)
    for row in task.load_rows("train", problems.train_file):
        yield {"messages": [*row["prompt"], {"role": "assistant", "content": task.demonstrate(row)}]}


def make_parser() -> argparse.ArgumentParser:
    parser = OneLineParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("output_file", type=Path)
    parser.add_argument("--task", choices=NAMES, required=True)
    parser.add_argument("--limit", type=COUNT, help="write only this number of rows")
    return parser


def main(words: Sequence[str] | None = None) -> None:
    args = make_parser().parse_args(words)
    rows = itertools.islice(sft_rows(problems_of(args.task)), args.limit)
    write_atomically(args.output_file, "".join(json.dumps(row) + "\n" for row in rows))


if __name__ == "__main__":
    run_script("python -m smollm.data", main)
