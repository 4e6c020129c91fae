"""Columns of users' rows that become a conversation: Alpaca's, ShareGPT's, and those that a template names."""

from __future__ import annotations

import string
from collections.abc import Mapping, Sequence
from typing import Any

from d1.models.messages import Message, require_text
from d1.ranges import nearest
from d1.rows import json_text

Row = dict[str, Any]

ALPACA, SHAREGPT = {"instruction", "output"}, {"conversations"}
ROLES = {  # of ShareGPT's `from`
    **dict.fromkeys(("human", "user"), "user"),
    **dict.fromkeys(("gpt", "chatgpt", "bing", "bard", "model", "assistant"), "assistant"),
    **dict.fromkeys(("tool", "observation", "function_response"), "tool"),
    "system": "system",
}


def as_conversation(row: Row) -> Row:
    """A row with Alpaca's or ShareGPT's columns as one with `messages`; any other row unchanged. ValueError says what
    is wrong with a cell."""
    if row.keys() >= SHAREGPT:
        messages, used = sharegpt_messages(row["conversations"]), {"conversations", "system"}
    elif row.keys() >= ALPACA:
        messages, used = alpaca_messages(row), {"instruction", "input", "output", "history", "system"}
    else:
        return row
    if row.get("system"):
        require_text(row["system"], "system")
        if messages[:1] and messages[0].get("role") == "system":
            raise ValueError("the column system and the first turn are both a system message: keep one")
        messages = [{"role": "system", "content": row["system"]}, *messages]
    return {name: cell for name, cell in row.items() if name not in used} | {"messages": messages}


def alpaca_messages(row: Row) -> list[Message]:
    """The turns of `history`, a list of [instruction, output], and then those of the row: `instruction`, with `input`
    on the next line if there is one, and `output`."""
    messages: list[Message] = []
    for turn in row.get("history") or []:
        if not isinstance(turn, list) or len(turn) != 2:
            raise ValueError(f"history must be a list of [instruction, output], got {turn!r:.80}")
        asked, answer = turn
        messages += turns_of(asked, answer, "an instruction of history", "an output of history")
    require_text(row["instruction"], "instruction")
    asked = row["instruction"]
    if row.get("input") not in (None, ""):
        require_text(row["input"], "input", empty_ok=True)
        asked = f"{asked}\n{row['input']}"
    return messages + turns_of(asked, row["output"], "instruction", "output")


def turns_of(asked: Any, answer: Any, asked_in: str, answer_in: str) -> list[Message]:
    require_text(asked, asked_in)
    require_text(answer, answer_in)
    return [{"role": "user", "content": asked}, {"role": "assistant", "content": answer}]


def sharegpt_messages(turns: Any) -> list[Message]:
    """Turns with `from` and `value` as messages, whose other members stay; messages stay as they are."""
    if not isinstance(turns, list) or not all(isinstance(turn, dict) for turn in turns):
        raise ValueError("conversations is not a list of {from, value}")
    messages = []
    for turn in turns:
        sender = turn.get("from")
        if sender is None:
            messages.append(turn)
            continue
        if sender not in ROLES:
            known = ", ".join(ROLES)
            raise ValueError(f"from {sender!r} has no role{nearest(sender, ROLES)}: use one of {known}")
        others = {name: cell for name, cell in turn.items() if name not in ("from", "value") and cell is not None}
        messages.append(others | {"role": ROLES[sender], "content": turn.get("value")})
    return messages


# --- Templates --------------------------------------------------------------------------------------------------------


class Template(string.Formatter):
    """Fills format strings with cells, as `str.format_map`. Numbers have the digits of the file; true, false, lists
    and objects are JSON."""

    def get_field(self, field_name: str, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
        if field_name in kwargs:  # a name with dots or brackets, too
            return self.get_value(field_name, args, kwargs), field_name
        return super().get_field(field_name, args, kwargs)

    def get_value(self, key: int | str, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
        if isinstance(key, int):
            raise ValueError("--template needs the name of a column in each pair of braces, as in {question}")
        if kwargs[key] is None:
            raise ValueError(f"{key} is null, which --template cannot fill in")
        return kwargs[key]

    def format_field(self, value: Any, format_spec: str) -> str:
        if not format_spec and isinstance(value, bool | list | dict):
            return json_text(value)
        return str(super().format_field(value, format_spec))


TEMPLATE = Template()

# --- What to do with other columns ------------------------------------------------------------------------------------

ANSWERS = ("answer", "output", "response", "completion", "target", "label", "solution", "summary")
QUESTIONS = ("question", "instruction", "prompt", "input", "problem", "query", "text", "document")


def way_for(columns: Sequence[str]) -> str:
    """What to do with these columns, which are not understood: a template with two of them, or a function."""
    if len(columns) < 2:
        return "use --data_function"
    answer = next((name for name in columns if name.lower() in ANSWERS), columns[-1])
    others = [name for name in columns if name != answer]
    question = next((name for name in others if name.lower() in QUESTIONS), others[0])
    return f"use --template '{{{question}}}' '{{{answer}}}' or --data_function"
