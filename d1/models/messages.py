"""Conversations as rows of data hold them: the fields of a message, and the columns that belong to a conversation.

A message becomes what chat templates read (https://huggingface.co/docs/transformers/chat_extras): `role`, `content` as
text, `reasoning_content`, and `tool_calls` whose arguments are objects. ShareGPT's `from` and `value` are read, too.
Its other fields stay. A field or a column that says something which no chat template reads is an error that names it.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping
from typing import Any

from d1.ranges import nearest

Message = dict[str, Any]
Options = Mapping[str, Any]  # what a chat template gets besides the messages

REASONING = ("reasoning_content", "thinking", "reasoning")  # names of a message's thoughts; templates read the first
WEIGHTS = ("weight", "train", "training", "loss")  # whether a turn is trained on: OpenAI's name, Axolotl's, ms-swift's
LABELS = {"true": 1, "1": 1, "1.0": 1, "false": -1, "0": -1, "0.0": -1}  # of a good completion and of a bad one
SENDERS = {  # ShareGPT's names of roles
    "human": "user",
    "user": "user",
    "gpt": "assistant",
    "chatgpt": "assistant",
    "bing": "assistant",
    "bard": "assistant",
    "model": "assistant",
    "assistant": "assistant",
    "tool": "tool",
    "observation": "tool",
    "function_response": "tool",
    "system": "system",
}
CALLS = ("function_call", "tool_call")  # senders of a turn whose `value` is a call, or calls, in JSON
SYSTEM = ("system", "system_prompt")  # columns with the text of a system message
TEMPLATE_COLUMNS = ("tools", "documents")  # columns that templates read under the same names
NO_TEXT = "models here read text alone"
NO_WEIGHT = "a turn is trained on as a whole: use weight"
NO_REASONING = "give it as reasoning_content"
UNREAD_FIELDS = {
    "function_call": "give calls as tool_calls",
    "train_detail": NO_WEIGHT,
    "training_detail": NO_WEIGHT,
    "images": NO_TEXT,
    "image": NO_TEXT,
    "videos": NO_TEXT,
    "video": NO_TEXT,
    "audio": NO_TEXT,
    "audios": NO_TEXT,
    "refusal": "give the text as content",
    "reasoning_details": NO_REASONING,
    "thinking_blocks": NO_REASONING,
    "thoughts": NO_REASONING,
    "thought": NO_REASONING,
}
UNREAD_ARGUMENTS = ("parameters", "args", "input")  # names of a call's arguments that no chat template reads
UNREAD_COLUMNS = {
    "functions": "give them as tools",
    "images": NO_TEXT,
    "image": NO_TEXT,
    "videos": NO_TEXT,
    "video": NO_TEXT,
    "audio": NO_TEXT,
    "audios": NO_TEXT,
}
# All that `conversation_of` reads.
CONVERSATION_COLUMNS = (*SYSTEM, *TEMPLATE_COLUMNS, "chat_template_kwargs", *UNREAD_COLUMNS)
# Arguments of `apply_chat_template`, which a row may not set.
RESERVED = (
    "conversation",
    "messages",
    "chat_template",
    "add_generation_prompt",
    "continue_final_message",
    "tokenize",
    "padding",
    "truncation",
    "max_length",
    "return_tensors",
    "return_dict",
    "return_assistant_tokens_mask",
    "tokenizer_kwargs",
    "sanitize_control_tokens",
    *TEMPLATE_COLUMNS,
)


def require_text(value: Any, name: str, empty_ok: bool = False) -> None:
    if not isinstance(value, str):
        todo = ""
        if isinstance(value, int | float):
            todo = " (in SFT, --template turns numbers into text)"
        raise ValueError(f"{name} is {type(value).__name__}, not text{todo}")
    if not empty_ok and not value.strip():
        raise ValueError(f"{name} is empty")


def as_messages(row: Mapping[str, Any], name: str, role: str) -> list[Message]:
    """The messages of a row's column `name`; a text is one message of `role`."""
    if isinstance(row[name], list):
        return row[name]
    require_text(row[name], name)
    return [{"role": role, "content": row[name]}]


def conversation_of(row: Mapping[str, Any], messages: Any) -> tuple[list[Message], dict[str, Any]]:
    """The whole conversation of a row: `messages` as chat templates read them, after the message of the column
    `system`; and what the template gets besides, from `tools`, `documents` and `chat_template_kwargs`.

    Raises:
        ValueError: a message, or a column that belongs to the conversation, is malformed, or nothing reads it.
    """
    return with_system(row, read_messages(messages)), template_options(row)


def whole_turns(messages: Any) -> list[Message]:
    """The messages up to the assistant's last; ValueError if they are no messages, or if no other comes before it."""
    turns = read_messages(messages)
    while turns and turns[-1]["role"] != "assistant":
        turns = turns[:-1]
    if len(turns) < 2:
        raise ValueError("no assistant turn follows a user turn")
    return turns


# --- Columns ----------------------------------------------------------------------------------------------------------


def with_system(row: Mapping[str, Any], messages: list[Message]) -> list[Message]:
    for name in SYSTEM:
        text = row.get(name)
        if text is None or text == "":
            continue
        require_text(text, f"the column {name}")
        if messages and messages[0]["role"] == "system":
            if messages[0]["content"] != text:
                raise ValueError(f"the column {name} and the system message differ: give one of them")
            continue
        messages = [{"role": "system", "content": text}, *messages]
    return messages


def template_options(row: Mapping[str, Any]) -> dict[str, Any]:
    """What a chat template gets besides the messages of a row; ValueError for a column that nothing reads."""
    for name, todo in UNREAD_COLUMNS.items():
        if row.get(name):
            raise ValueError(f"the column {name} would be lost: {todo}")
    options = from_json(row.get("chat_template_kwargs"), "chat_template_kwargs") or {}
    if not isinstance(options, dict):
        raise ValueError(f"chat_template_kwargs is {type(options).__name__}, not an object")
    for name in options:
        if name in RESERVED:
            raise ValueError(f"chat_template_kwargs has {name!r}, which is no variable of a chat template")
    options = {name: value for name, value in options.items() if value is not None}
    for name in TEMPLATE_COLUMNS:
        entries = from_json(row.get(name), name)
        if not entries:
            continue
        if not isinstance(entries, list):
            raise ValueError(f"the column {name} is {type(entries).__name__}, not a list")
        options[name] = [drop_nulls(read_object(entry, f"an entry of {name}")) for entry in entries]
    for tool in options.get("tools", ()):  # raises for a tool without a name
        name_of_tool(tool)
    return options


def name_of_tool(tool: Mapping[str, Any]) -> str:
    function = tool.get("function") or tool
    name = function.get("name") if isinstance(function, dict) else None
    if not isinstance(name, str) or not name:
        raise ValueError("an entry of tools has no name of a function")
    return name


# --- Messages ---------------------------------------------------------------------------------------------------------


def read_messages(messages: Any) -> list[Message]:
    """The messages as chat templates read them. Reading them twice changes nothing."""
    if not isinstance(messages, list) or not all(isinstance(message, dict) for message in messages):
        todo = ""
        if isinstance(messages, str):
            todo = ", but a text: write it as a list, in .jsonl or .parquet"
        raise ValueError(f"messages is not a list of {{role, content}}{todo}")
    return [read_message(message) for message in messages]


def read_message(message: Message) -> Message:
    # A table's rows have all fields of all messages; those that a message lacks are null.
    message = read_role({name: value for name, value in message.items() if value is not None})
    role = message["role"]
    for name, todo in UNREAD_FIELDS.items():
        if message.get(name):
            raise ValueError(f"{name} of the {role} message would be lost: {todo}")
    calls = from_json(message.pop("tool_calls", None), "tool_calls") or []
    if not isinstance(calls, list):
        raise ValueError(f"tool_calls of the {role} message is {type(calls).__name__}, not a list: {calls!r:.80}")
    if calls:
        message["tool_calls"] = [read_call(call) for call in calls]
        message.setdefault("content", "")
    message["content"] = join_text_parts(message.get("content"), f"the {role} message")
    require_text(message["content"], f"the {role} message", empty_ok=role != "assistant" or bool(calls))
    thoughts = read_thoughts(message)
    if thoughts:
        message["reasoning_content"] = thoughts
        message["thinking"] = thoughts  # gpt-oss reads this one
    check_weight(message)
    return message


def read_role(message: Message) -> Message:
    """A message with the name of its role that chat templates know, also if it has ShareGPT's `from` and `value`."""
    if "role" in message:
        require_text(message["role"], "a message's role")
        known = SENDERS.get(message["role"].lower())
        # A template may have a role of its own, such as `observation`.
        if known in ("user", "assistant") or known == message["role"].lower():
            return {**message, "role": known}
        return message
    if "from" not in message:
        raise ValueError(f"a message has no role, but {', '.join(message) or 'no field at all'}")
    sender = message["from"]
    other_fields = {name: value for name, value in message.items() if name not in ("from", "value")}
    if sender in CALLS:
        calls = from_json(message.get("value"), f"the value of {sender}")
        if not calls:
            raise ValueError(f"the value of {sender} has no call")
        if not isinstance(calls, list):
            calls = [calls]
        return {**other_fields, "role": "assistant", "tool_calls": calls}
    if not isinstance(sender, str) or sender.lower() not in SENDERS:
        known_names = ", ".join((*SENDERS, *CALLS))
        raise ValueError(f"from {sender!r:.80} has no role{nearest(str(sender), SENDERS)}: use one of {known_names}")
    return {**other_fields, "role": SENDERS[sender.lower()], "content": message.get("value")}


def join_text_parts(content: Any, name: str) -> Any:
    """The content of a message, its parts joined to one text; ValueError for a part that is no text."""
    if not isinstance(content, list):
        return content
    texts = []
    for part in content:
        kind: Any = "text"
        text: Any = part
        if isinstance(part, dict):
            kind, text = part.get("type"), part.get("text")
        if kind != "text" or not isinstance(text, str):
            parts = f"{name} has a part of type {kind}"
            raise ValueError(f"{parts}: a message is a list of parts, such as images, not text, and {NO_TEXT}")
        texts.append(text)
    return "".join(texts)


def read_thoughts(message: Message) -> str:
    """The thoughts of a message; its fields for them are removed if they are empty. ValueError if they differ."""
    thoughts: dict[str, str] = {}
    for name in REASONING:
        if name not in message:
            continue
        require_text(message[name], f"{name} of the {message['role']} message", empty_ok=True)
        if message[name].strip():
            thoughts[name] = message[name]
        else:
            del message[name]
    if len(set(thoughts.values())) > 1:
        raise ValueError(f"{' and '.join(thoughts)} of the {message['role']} message differ: give one of them")
    return next(iter(thoughts.values()), "")


def read_call(entry: Any) -> dict[str, Any]:
    """One call as `{"type": "function", "function": {"name", "arguments"}}`, where the arguments are an object."""
    fields = read_object(entry, "an entry of tool_calls")
    call = {name: value for name, value in fields.items() if value is not None}
    nested = call.pop("function", None)
    if nested is None:
        nested = {name: call.pop(name) for name in ("name", "arguments") if name in call}
    function_fields = read_object(nested, "a call's function")
    function = {name: value for name, value in function_fields.items() if value is not None}
    if not isinstance(function.get("name"), str):
        raise ValueError("an entry of tool_calls has no name of a function")
    for name in (*UNREAD_ARGUMENTS, "arguments"):
        if call.get(name) or (name in UNREAD_ARGUMENTS and function.get(name)):
            todo = "give them as arguments of its function"
            raise ValueError(f"{name} of the call to {function['name']} would be lost: {todo}")
    arguments = function.get("arguments")
    if isinstance(arguments, dict):
        arguments = drop_nulls(arguments)
    else:
        arguments = read_object(arguments or {}, f"the arguments of the call to {function['name']}")
    return {**call, "type": call.get("type", "function"), "function": {**function, "arguments": arguments}}


def check_weight(message: Message) -> None:
    """ValueError for a weight that is neither 0 nor 1, and for one that trains on another role than the assistant."""
    role = message["role"]
    for name in WEIGHTS:
        value = message.get(name, 0)
        if not isinstance(value, bool | int | float) or value not in (0, 1):
            raise ValueError(f"{name} of the {role} message is {value!r}, neither 0 nor 1")
        if value and role != "assistant":
            raise ValueError(f"{name} of the {role} message is {value!r}: only the assistant's turns are trained on")


def read_weight(message: Message) -> bool | None:
    """Whether a message says that it is trained on; None if it does not say."""
    weights = [bool(message[name]) for name in WEIGHTS if name in message]
    if not weights:
        return None
    return all(weights)


def sign_of(label: Any) -> int:
    """1 for a completion with the label true, -1 for false; a csv file has them as text. Raises ValueError for anything
    else."""
    sign = LABELS.get(str(label).strip().lower())
    if sign is None:
        raise ValueError(f"the label is {label!r}, neither true nor false")
    return sign


# --- Values -----------------------------------------------------------------------------------------------------------


def from_json(value: Any, name: str) -> Any:
    """The value, read if it is the text of one in JSON."""
    if not isinstance(value, str):
        return value
    try:
        return json.loads(value) if value.strip() else None
    except ValueError:
        raise ValueError(f"{name} is a text that is not JSON: {value!r:.80}") from None


def read_object(value: Any, name: str) -> dict[str, Any]:
    """An object, perhaps as a text in JSON."""
    parsed = from_json(value, name)
    if not isinstance(parsed, dict):
        raise ValueError(f"{name} is {type(parsed).__name__}, not an object: {value!r:.80}")
    return parsed


def drop_nulls(value: Any) -> Any:
    """A value without null fields: a table's rows have the fields of all rows, as nulls. TRL removes them, too."""
    if isinstance(value, dict):
        return {name: drop_nulls(field) for name, field in value.items() if field is not None}
    if isinstance(value, list):
        return [drop_nulls(entry) for entry in value]
    return value


def texts_in(value: Any) -> Iterator[str]:
    """All texts in a value, and the names of its fields."""
    if isinstance(value, str):
        yield value
    elif isinstance(value, dict):
        yield from value
        yield from texts_in(list(value.values()))
    elif isinstance(value, list):
        for entry in value:
            yield from texts_in(entry)


def map_texts(value: Any, change: Callable[[str], str], keys: bool = False) -> Any:
    """A copy of a value whose texts are changed, with `keys` also the names of its fields."""
    if isinstance(value, str):
        return change(value)
    if isinstance(value, dict):
        changed = {}
        for name, field in value.items():
            if keys:
                name = change(name)
            changed[name] = map_texts(field, change, keys)
        return changed
    if isinstance(value, list):
        return [map_texts(entry, change, keys) for entry in value]
    return value
