"""Columns of users' rows that become a conversation: Alpaca's, ShareGPT's, and those that a template names."""

from __future__ import annotations

import math
import re
import string
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from datasets import Dataset

from d1.models.messages import Message, require_text, sign_of
from d1.ranges import nearest
from d1.rows import json_text

Row = dict[str, Any]

ALPACA, SHAREGPT = {"instruction", "output"}, {"conversations"}


def as_conversation(row: Row) -> Row:
    """A row with Alpaca's or ShareGPT's columns as one with `messages`; any other row unchanged. ValueError says what
    is wrong with a cell."""
    if row.keys() >= SHAREGPT:
        turns = row["conversations"]
        replaced_columns = {"conversations"}
        if not isinstance(turns, list) or not all(isinstance(turn, dict) for turn in turns):
            raise ValueError("conversations is not a list of {from, value}")
    elif row.keys() >= ALPACA:
        turns = alpaca_messages(row)
        replaced_columns = {"instruction", "input", "output", "history"}
    else:
        return row
    conversation = {name: cell for name, cell in row.items() if name not in replaced_columns}
    conversation["messages"] = turns
    return conversation


def alpaca_messages(row: Row) -> list[Message]:
    """The turns of `history`, a list of [instruction, output], and then those of the row: `instruction`, with `input`
    on the next line if there is one, and `output`."""
    messages: list[Message] = []
    history = row.get("history") or []
    if not isinstance(history, list):
        raise ValueError(f"history must be a list of [instruction, output], got {history!r:.80}")
    for turn in history:
        if not isinstance(turn, list) or len(turn) != 2:
            raise ValueError(f"history must be a list of [instruction, output], got {turn!r:.80}")
        instruction, output = turn
        messages += one_exchange(instruction, output, "an instruction of history", "an output of history")
    require_text(row["instruction"], "instruction")
    instruction = row["instruction"]
    if row.get("input") not in (None, ""):
        require_text(row["input"], "input", empty_ok=True)
        instruction = f"{instruction}\n{row['input']}"
    messages += one_exchange(instruction, row["output"], "instruction", "output")
    return messages


def one_exchange(question: Any, answer: Any, question_name: str, answer_name: str) -> list[Message]:
    """A user's turn and the assistant's; ValueError calls them by the names if they are no text."""
    require_text(question, question_name)
    require_text(answer, answer_name)
    return [{"role": "user", "content": question}, {"role": "assistant", "content": answer}]


# --- Templates --------------------------------------------------------------------------------------------------------

NO_NAME = "--template needs the name of a column in each pair of braces, as in {question}"


def require_cell(value: Any, name: str) -> None:
    """Raise ValueError for a cell, or a part of one, that is null or NaN, as pandas writes an empty cell."""
    if value is None:
        raise ValueError(f"{name} is null, which --template cannot fill in")
    if isinstance(value, float) and math.isnan(value):
        raise ValueError(f"{name} is NaN, which --template cannot fill in")


class Template(string.Formatter):
    """Fills format strings with cells, as `str.format_map`. Numbers have the digits of the file; true, false, lists
    and objects are JSON."""

    def get_field(self, field_name: str, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
        if field_name in kwargs:  # a name with dots or brackets, too
            return self.get_value(field_name, args, kwargs), field_name
        value, key = super().get_field(field_name, args, kwargs)
        require_cell(value, field_name)
        if callable(value):  # such as `values` of an object
            raise ValueError(f"{field_name} is a method of Python: a field has brackets, as in {{meta[title]}}")
        return value, key

    def get_value(self, key: int | str, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
        if isinstance(key, int):
            raise ValueError(NO_NAME)
        require_cell(kwargs[key], key)
        return kwargs[key]

    def format_field(self, value: Any, format_spec: str) -> str:
        if not format_spec and isinstance(value, bool | list | dict):
            return json_text(value)
        return str(super().format_field(value, format_spec))


TEMPLATE = Template()


def check_template(template: Sequence[str], columns: Sequence[str]) -> None:
    """Raise ValueError for a format string that cannot be read, and for a field that begins with no column's name."""
    for text in template:
        for field in template_fields(text):
            column = re.split(r"[.\[]", field, maxsplit=1)[0]  # of {meta[title]} and {meta.title}, meta
            if field in columns or column in columns:
                continue
            if not column or column.isdecimal():
                raise ValueError(NO_NAME)
            raise ValueError(
                f"--template {text!r}: there is no column {column!r}{nearest(column, columns)}; the data has the "
                f"columns {', '.join(sorted(columns))}"
            )


def template_fields(text: str) -> Iterator[str]:
    """The fields of a format string, also those within the format of another field; ValueError if it is malformed."""
    try:
        parts = list(TEMPLATE.parse(text))
    except ValueError as error:
        raise ValueError(f"--template {text!r}: {error}; write a brace of the text itself twice") from None
    for _, field, format_spec, _ in parts:
        if field is not None:
            yield field
        if format_spec:
            yield from template_fields(format_spec)


# --- What to do with other columns ------------------------------------------------------------------------------------

ANSWERS = ("answer", "output", "response", "completion", "target", "label", "solution", "summary")
QUESTIONS = ("question", "instruction", "prompt", "input", "problem", "query", "text", "document")
PREFERENCES = {"chosen", "rejected"}


def suggest_flags(columns: Sequence[str]) -> str:
    """What to do with these columns, which are not understood: a template with two of them, a function, or another
    stage. Only names that say question or answer are suggested: another column would be trained on without an error."""
    if set(columns) >= PREFERENCES:
        return (
            "pairs of chosen and rejected answers are for `d1 prefer`; to train on the chosen ones alone, use "
            "--data_function"
        )
    if len(columns) < 2:
        return "use --data_function"
    answer = next((name for name in columns if name.lower() in ANSWERS), "ANSWER")
    question = next((name for name in columns if name.lower() in QUESTIONS), "QUESTION")
    advice = f"use --template '{{{question}}}' '{{{answer}}}' or --data_function"
    if question in columns and answer in columns:
        return advice
    return f"{advice}, with a column's name for each word in capitals"


def check_labels(data: Dataset) -> None:
    """Raise ValueError for `prompt` and `completion` next to labels: completions with false are not to be learnt. A
    column `label` with any other value says nothing about them."""
    names = set(data.column_names)
    if "messages" in names or not names >= {"prompt", "completion", "label"}:
        return
    labels = [cell for cell in data.with_format(None)["label"][:] if cell not in (None, "")]
    try:
        for label in labels:
            sign_of(label)
    except ValueError:
        return
    if labels:
        raise ValueError(
            "the column label says whether a completion is good or bad, and SFT would train on both: use "
            "`d1 prefer --method elbo-kto`, or keep the good rows and remove this column"
        )
