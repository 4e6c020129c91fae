"""Read a file or a hub data set and convert it to token rows for training and evaluation; bad rows are reported."""

from __future__ import annotations

import math
import runpy
from collections.abc import Callable
from pathlib import Path
from typing import Any

from datasets import Dataset
from transformers import PreTrainedTokenizerBase

from d1.runs.rows import load_rows as load_rows
from d1.runs.rows import tokenised, usable_rows
from d1.sft import conversations
from d1.sft.conversations import FEATURES, S1K, Row, tokenize_row


def load_function(spec: str) -> Callable[[Row], Any]:
    """The function of `path/to/file.py:name`."""
    file, _, name = spec.rpartition(":")
    if not file.endswith(".py") or not Path(file).is_file():
        raise ValueError(f"--data_function {spec}: expected FILE.py:FUNCTION with a file that exists")
    function = runpy.run_path(file).get(name)
    if not callable(function):
        raise ValueError(f"--data_function {spec}: {file} defines no function {name!r}")
    return function


def preprocess_dataset(
    data: Dataset,
    tokenizer: PreTrainedTokenizerBase,
    max_length: int,
    test_split: float = 0.01,
    *,
    overlong: str = "truncate",
    bad_rows: str = "error",
    function: Callable[[Row], Any] | None = None,
    template: tuple[str, str] | None = None,
    num_proc: int | None = None,
    seed: int = 42,
) -> tuple[Dataset, Dataset]:
    """Converts conversations to token rows, shuffled and split into (train, evaluation).

    Args:
        data: rows with s1K's columns (`question`, `thinking_trajectories`, `attempt`), or `messages`, or `prompt` and
            `completion` (text or messages); with a `function` or a `template`, any columns.
        max_length: maximum number of tokens per row.
        test_split: share of the rows held out, rounded up.
        overlong: what to do with longer rows: "truncate" (the answer loses its end and gets no EOS), "drop", "refuse".
        bad_rows: what to do with rows that cannot be trained on: "error", or "skip" them and say how many and which.
        function: row -> messages, or a row that has `messages` or `prompt` and `completion`.
        template: two format strings with {columns}, the prompt's and the completion's.
        num_proc: processes that tokenise; the result is cached by `datasets`.

    Returns:
        Two data sets with the columns `input_ids`, `answer` (bool, the tokens to train on: the last turn), `length`,
        `start` (of the answer) and `status` ("ok" or "truncated").

    Raises:
        ValueError: the columns are not understood, rows are bad, or nothing is left to train on.
    """
    columns = set(data.column_names)
    understood = any(needed <= columns for needed in (S1K, {"messages"}, {"prompt", "completion"}))
    if function is None and template is None and not understood:
        raise ValueError(
            f"the data has the columns {', '.join(sorted(columns))}; supported are question + thinking_trajectories + "
            "attempt, messages, or prompt + completion. Build the last two with --template '{question}' '{answer}', or "
            "convert each row with --data_function FILE.py:FUNCTION"
        )
    options = {
        "tokenizer": tokenizer,
        "max_length": max_length,
        "overlong": overlong,
        "function": function,
        "template": template,
    }
    rows = tokenised(data, tokenize_row, conversations, options, FEATURES, num_proc)
    usable = usable_rows(rows["status"], rows["problem"], bad_rows)
    rows = rows.remove_columns("problem").select(usable).shuffle(seed=seed)
    held_out = math.ceil(len(rows) * test_split)
    if not 0 <= held_out < len(rows):
        raise ValueError(f"nothing to train on: --test_split {test_split} holds out {held_out} of {len(rows)} rows")
    return rows.select(range(held_out, len(rows))), rows.select(range(held_out))
