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
from d1.runs.cli import run_script
from d1.tasks import TASKS, load_task, under_protocol

ROOT = Path(__file__).resolve().parents[1]
PROTOCOL = "llada"
PER_PROBLEM = 4  # rows with new numbers per problem of SVAMP


@dataclass(frozen=True)
class Problems:
    """Where the problems of a task are read from; None: where the task looks for them itself.

    Attributes:
        task: its name in d1's TASKS.
        completion: tokens of the canvas, enough for nearly all solutions.
    """

    task: str
    train_file: str | None = None
    test_file: str | None = None
    completion: int = 48


def problems_of(name: str) -> Problems:
    """The problems of an entry of `NAMES`."""
    if name == "words":
        train, test = (os.path.relpath(ROOT / "dataset" / f"arithmetic_{split}.jsonl") for split in ("train", "test"))
        return Problems("gsm8k", train, test)
    if name == "svamp":
        return Problems("svamp")
    folder = Path(os.environ.get("D1_FILES", "")) / "gsm8k"
    train, test = (str(folder / f"{split}.jsonl") for split in ("train", "test"))
    if os.environ.get("D1_FILES") and os.path.isfile(train) and os.path.isfile(test):
        return Problems("gsm8k", train, test, completion=160)
    return Problems("gsm8k", completion=160)


NAMES = ("svamp", "gsm8k", "words")  # in the order in which they are tried


def first_readable() -> tuple[str, list[str]]:
    """The first of `NAMES` whose problems can be read, and why those before it cannot."""
    faults: list[str] = []
    for name in NAMES:
        problems = problems_of(name)
        if problems.task not in TASKS:
            continue
        try:
            load_task(problems.task).load_rows("train", problems.train_file)
        except (OSError, ValueError) as error:
            faults.append(f"{name} cannot be read: {' '.join(str(error).split())}")
            continue
        return name, faults
    raise OSError("; ".join(faults))


def sft_rows(problems: Problems, seed: int = 0) -> Iterator[dict[str, Any]]:
    """Rows with `messages`: SVAMP's training problems with new numbers, or the training problems as they are."""
    source = load_task(problems.task)
    made = getattr(source, "training_rows", None)
    if made is not None:
        try:
            yield from made(seed, PER_PROBLEM, problems.train_file)
            return
        except ValueError as error:
            if "Numbers" not in str(error):  # the hub's copy has no places for numbers
                raise
    task = under_protocol(source, PROTOCOL)
    for row in task.load_rows("train", problems.train_file):
        yield {"messages": [*row["prompt"], {"role": "assistant", "content": task.demonstrate(row)}]}


def make_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("output_file", type=Path)
    parser.add_argument("--task", choices=NAMES, required=True)
    parser.add_argument("--limit", type=int, help="write only this number of rows")
    return parser


def main(words: Sequence[str] | None = None) -> None:
    args = make_parser().parse_args(words)
    rows = itertools.islice(sft_rows(problems_of(args.task)), args.limit)
    write_atomically(args.output_file, "".join(json.dumps(row) + "\n" for row in rows))


if __name__ == "__main__":
    run_script("python -m smollm.data", main)
