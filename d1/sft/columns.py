"""Columns of users' rows that become a conversation: Alpaca's, ShareGPT's, and those that a template names."""

from __future__ import annotations

import string
from collections.abc import Mapping, Sequence
from typing import Any

from d1.models.messages import Message, require_text
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


def require_cell(value: Any, name: str) -> None:
    """Raise ValueError for a cell, or a part of one, that is null."""
    if value is None:
        raise ValueError(f"{name} is null, which --template cannot fill in")


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
            raise ValueError("--template needs the name of a column in each pair of braces, as in {question}")
        require_cell(kwargs[key], key)
        return kwargs[key]

    def format_field(self, value: Any, format_spec: str) -> str:
        if not format_spec and isinstance(value, bool | list | dict):
            return json_text(value)
        return str(super().format_field(value, format_spec))


TEMPLATE = Template()

# --- What to do with other columns ------------------------------------------------------------------------------------

ANSWERS = ("answer", "output", "response", "completion", "target", "label", "solution", "summary")
QUESTIONS = ("question", "instruction", "prompt", "input", "problem", "query", "text", "document")


def suggest_flags(columns: Sequence[str]) -> str:
    """What to do with these columns, which are not understood: a template with two of them, or a function."""
    if len(columns) < 2:
        return "use --data_function"
    answer = next((name for name in columns if name.lower() in ANSWERS), columns[-1])
    other_columns = [name for name in columns if name != answer]
    question = next((name for name in other_columns if name.lower() in QUESTIONS), other_columns[0])
    return f"use --template '{{{question}}}' '{{{answer}}}' or --data_function"
