"""One preference row, from its columns to token ids.

The columns are those of TRL's formats or of Axolotl's strategies. An answer is text, a message, or messages. The prompt
is a column, or the beginning of the conversations or texts that the answers belong to. Text becomes a message of the
user or the assistant, as in SFT.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any

from datasets import Features, Value

from d1.models.messages import (
    SYSTEM,
    Message,
    Options,
    read_messages,
    require_text,
    sign_of,
    template_options,
    whole_turns,
)
from d1.models.tokenizer import render_prompt, trained_ids
from d1.runs.data import describe_row_error

ANSWERS = {  # an answer -> the columns that may hold it; the first one counts
    "chosen": ("chosen", "chosen_response"),
    "rejected": ("rejected", "rejected_response"),
    "completion": ("completion",),
}
PROMPTS = ("prompt", "question", "instruction", "input", "messages", "conversations")
SYSTEM_ROLES = ("system", "developer")
UNSUPPORTED = ("history",)
MESSAGES_AS_TEXT = re.compile(r"\s*\[\s*\{\s*['\"](role|content|from|value)['\"]\s*:")
TRANSCRIPT = re.compile(r"\s*(Human|Assistant): ?")  # how HH-RLHF writes the turns of a conversation into one text
TRANSCRIPT_TURN = re.compile(r"(?:\r?\n){2}(Human|Assistant): ?")
TRANSCRIPT_ROLES = {"Human": "user", "Assistant": "assistant"}
EMPTY: tuple[Any, ...] = (None, "", [])


# --- Columns ----------------------------------------------------------------------------------------------------------


def answer_columns(features: Features, *, paired: bool) -> dict[str, str]:
    """The columns of the answers: of `chosen` and `rejected`, or, unless `paired`, of `completion`.

    Raises:
        ValueError: the columns have no such answers, or the prompt would be taken from texts next to which a column
            may hold it.
    """
    column_of: dict[str, str] = {}
    for answer, names in ANSWERS.items():
        present = [name for name in names if name in features]
        if present:
            column_of[answer] = present[0]
    if "chosen" in column_of and "rejected" in column_of:
        pair = {answer: column_of[answer] for answer in ("chosen", "rejected")}
        check_implicit_prompt(features, pair)
        return pair
    if not paired and "completion" in column_of and "label" in features:
        return {"completion": column_of["completion"]}
    listed = ", ".join(sorted(features))
    needed = "chosen and rejected, perhaps with prompt"
    if not paired:
        needed += "; or prompt, completion and label"
    raise ValueError(f"the data has the columns {listed}; needed are {needed}")


def check_implicit_prompt(features: Features, pair: Mapping[str, str]) -> None:
    """Refuse (ValueError) pairs of texts without a known prompt column, if another column may hold the prompt."""
    if any(name in features for name in PROMPTS) or not is_text(features[pair["chosen"]]):
        return
    candidates = [name for name, feature in features.items() if name not in pair.values() and may_hold_prompt(feature)]
    if candidates:
        raise ValueError(unknown_prompt("the data has pairs", candidates))


def check_no_other_text(row: Mapping[str, Any], columns: Mapping[str, str]) -> None:
    """`check_implicit_prompt` for a row of two texts in columns whose other rows hold messages, which have no type."""
    candidates = []
    for name, cell in row.items():
        if name not in columns.values() and cell not in EMPTY and isinstance(cell, str | list | dict):
            candidates.append(name)
    if candidates:
        raise ValueError(unknown_prompt("the row has a pair", candidates))


def unknown_prompt(pairs: str, candidates: Sequence[str]) -> str:
    return (
        f"{pairs} of texts and no column {', '.join(PROMPTS)}, but {', '.join(sorted(candidates))}: rename the one "
        "with the prompt to prompt; if both texts begin with the prompt, remove these columns"
    )


def is_text(feature: Any) -> bool:
    return isinstance(feature, Value) and feature.dtype in ("string", "large_string")


def may_hold_prompt(feature: Any) -> bool:
    return is_text(feature) or not isinstance(feature, Value)


# --- Cells to messages ------------------------------------------------------------------------------------------------


def cell_messages(cell: Any, name: str, role: str) -> list[Message]:
    """The messages of a cell with text (a message of `role`), one message, or messages. ValueError names its type."""
    if isinstance(cell, str):
        return text_messages(cell, name, role)
    messages = [cell] if isinstance(cell, dict) else cell
    if cell is None:
        raise ValueError(f"{name} is null, not text or messages")
    if not isinstance(messages, list) or not all(isinstance(message, dict) for message in messages):
        raise ValueError(f"{name} is {type(cell).__name__}, not text or messages")
    if not messages:
        raise ValueError(f"{name} is empty")
    try:
        return read_messages(messages)
    except ValueError as error:
        raise ValueError(f"{name}: {error}") from None


def text_messages(text: str, name: str, role: str) -> list[Message]:
    """The messages of a text: one of `role`, or the turns of a transcript as HH-RLHF has them."""
    require_text(text, name)
    if MESSAGES_AS_TEXT.match(text):
        raise ValueError(f"{name} is a text that holds a list of messages: write it as a list, in .jsonl or .parquet")
    if not TRANSCRIPT.match(text):
        return [{"role": role, "content": text}]
    _, *parts = TRANSCRIPT_TURN.split("\n\n" + text.lstrip())
    messages = [
        {"role": TRANSCRIPT_ROLES[speaker], "content": turn}
        for speaker, turn in zip(parts[::2], parts[1::2], strict=True)
    ]
    if not messages[-1]["content"].strip():  # a prompt may end where the assistant's text begins
        messages.pop()
    if not messages:
        raise ValueError(f"{name} is empty")
    return messages


# --- Prompt and answer ------------------------------------------------------------------------------------------------


def conversations(row: Mapping[str, Any], columns: Mapping[str, str]) -> dict[str, list[Message]]:
    """The conversation of each answer, which ends with the answer.

    Args:
        columns: the column of each answer, from `answer_columns`.

    Raises:
        ValueError: a cell has no answer or no prompt, or cells contradict each other.
    """
    for name in UNSUPPORTED:
        if row.get(name) not in EMPTY:
            raise ValueError(f"the column {name} is not supported in preference data: remove it if it has no meaning")
    cells = {answer: row[column] for answer, column in columns.items()}
    is_plain = all(isinstance(cell, str) and not TRANSCRIPT.match(cell) for cell in cells.values())
    if is_plain and len(cells) == 2 and not any(name in row for name in PROMPTS):
        check_no_other_text(row, columns)
        row, cells = split_texts(cells["chosen"], cells["rejected"])
    return {answer: conversation(row, cell, columns[answer]) for answer, cell in cells.items()}


def split_texts(chosen: str, rejected: str) -> tuple[dict[str, str], dict[str, str]]:
    """The prompt and the answers of two texts that begin with it: all whole words that they share, as TRL's
    `extract_prompt`, which also splits words.

    Raises:
        ValueError: the texts are equal, one is the beginning of the other, or no whole word is shared.
    """
    if chosen == rejected:
        raise ValueError("chosen and rejected are equal")
    texts = (chosen, rejected)
    length = 0
    while length < min(len(chosen), len(rejected)) and chosen[length] == rejected[length]:
        length += 1
    shared = chosen[:length]
    if shared in texts:
        raise ValueError("one text is the beginning of the other, so the prompt is unknown: add a column prompt")
    ends = [
        position
        for position in range(1, len(shared) + 1)
        if all(text[position].isspace() for text in texts) and not shared[position - 1].isspace()
    ]
    if not ends:
        raise ValueError("chosen and rejected begin with no whole word in common: add a column prompt")
    end = ends[-1]
    return {"prompt": shared[:end]}, {"chosen": chosen[end:], "rejected": rejected[end:]}


def conversation(row: Mapping[str, Any], cell: Any, name: str) -> list[Message]:
    """The conversation that ends with the answer in `cell`, the column `name`."""
    answer = cell_messages(continued_transcript(row.get("prompt"), cell), name, "assistant")
    if answer[-1]["role"] != "assistant":
        raise ValueError(f"{name} does not end with a message of the assistant")
    filled = [column for column in PROMPTS if row.get(column) not in EMPTY]
    has_prompt = answer[0]["role"] in ("user", *SYSTEM_ROLES) or (len(answer) > 1 and not filled)
    if not has_prompt:
        messages = prompt_messages(row, filled)
        if messages[-1]["role"] == answer[0]["role"] == "assistant":
            raise ValueError(f"the prompt ends with a message of the assistant, and {name} begins with one: remove one")
        messages = messages + answer
    elif "prompt" in filled:
        messages = check_prompt(cell_messages(row["prompt"], "prompt", "user"), answer, name)
    else:
        messages = answer
    for column in SYSTEM:
        if row.get(column) not in EMPTY:
            require_text(row[column], column)
            messages = with_system([{"role": "system", "content": row[column]}], messages)
    return messages


def continued_transcript(prompt: Any, cell: Any) -> Any:
    """The cell; after a prompt that is a transcript, as the rest of it: the space that follows `Assistant:` is no part
    of the answer, and neither is a further turn of the user."""
    if not isinstance(prompt, str) or not isinstance(cell, str):
        return cell
    if TRANSCRIPT.match(prompt) and not (TRANSCRIPT.match(cell) or MESSAGES_AS_TEXT.match(cell)):
        return f"Assistant:{cell}"
    return cell


def prompt_messages(row: Mapping[str, Any], filled: Sequence[str]) -> list[Message]:
    """The messages of the prompt column: `prompt`, or the only one of the `filled` columns. ValueError for none, or
    for several."""
    if filled == ["instruction", "input"]:  # Alpaca's columns
        texts = [cell_messages(row[name], name, "user")[0]["content"] for name in filled]
        return [{"role": "user", "content": "\n".join(texts)}]
    if len(filled) > 1 and "prompt" not in filled:
        raise ValueError(f"{' and '.join(filled)} may both be the prompt: rename one to prompt, or remove the others")
    if not filled:
        empty = [name for name in PROMPTS if name in row]
        why = f"empty: {', '.join(empty)}" if empty else f"no column {', '.join(PROMPTS)}"
        raise ValueError(f"there is no prompt ({why})")
    return cell_messages(row[filled[0]], filled[0], "user")


def check_prompt(prompt: list[Message], answer: list[Message], name: str) -> list[Message]:
    """The conversation `answer`, with the system message of `prompt`. ValueError if it does not contain the prompt."""
    systems, prompt_turns = split_system(prompt)
    _, answer_turns = split_system(answer)
    expected = [spoken(message) for message in prompt_turns]
    before_answer = [spoken(message) for message in answer_turns[:-1]]
    begins_with_prompt = before_answer[: len(expected)] == expected
    contains_prompt = len(expected) == 1 and expected[0] in before_answer
    if not begins_with_prompt and not contains_prompt:
        start = expected[0][1][:40] if expected else ""
        raise ValueError(f"{name} is a conversation without the prompt {start!r}: remove the prompt, or correct it")
    return with_system(systems, answer)


def with_system(systems: list[Message], messages: list[Message]) -> list[Message]:
    """`messages` after the system messages, which they may already begin with. ValueError if they have others."""
    present = split_system(messages)[0]
    if not present:
        return systems + messages
    if systems and [*map(spoken, systems)] != [*map(spoken, present)]:
        raise ValueError("the system message of the conversation differs from that of the row: remove one")
    return messages


def split_system(messages: list[Message]) -> tuple[list[Message], list[Message]]:
    """The system messages that `messages` begin with, and the others."""
    start = 0
    while start < len(messages) and messages[start]["role"] in SYSTEM_ROLES:
        start += 1
    return messages[:start], messages[start:]


def spoken(message: Message) -> tuple[str, str, Any]:
    """The role, the text and the calls of a message, to compare with those of another."""
    return message["role"], message["content"].strip(), message.get("tool_calls")


# --- Tokens -----------------------------------------------------------------------------------------------------------


def tokenize_row(
    row: dict[str, Any],
    tokenizer: Any,
    max_prompt_length: int,
    max_completion_length: int,
    columns: Mapping[str, str],
) -> dict[str, Any]:
    """One row of `d1.preference.data.FEATURES`; `status` is "ok" or "bad", and `problem` says what is wrong."""
    paired = len(columns) == 2
    try:
        label = 1 if paired else sign_of(row["label"])
        turns = conversations(row, columns)
        options = template_options(row)
        prompts, completions = [], []
        for name in turns:
            prompt, completion = ids_of(turns[name], name, tokenizer, options)
            prompts.append(prompt)
            completions.append(completion)
        if prompts[0] != prompts[-1]:
            if [*map(spoken, turns["chosen"][:-1])] == [*map(spoken, turns["rejected"][:-1])]:
                raise ValueError(
                    "the chat template begins chosen and rejected differently: give both thoughts, or none"
                )
            raise ValueError("chosen and rejected differ before the last turn: they answer different prompts")
        if paired and completions[0] == completions[1]:
            raise ValueError("chosen and rejected are equal")
        if len(prompts[0]) > max_prompt_length:
            raise ValueError(f"the prompt has {len(prompts[0])} tokens, more than --max_prompt_length")
        longest = max(map(len, completions))
        if longest > max_completion_length:
            raise ValueError(f"a completion of {longest} tokens is longer than --max_completion_length")
    except Exception as error:  # a chat template may raise anything
        return {"prompt_ids": [], "completions": [], "label": 0, "status": "bad", "problem": describe_row_error(error)}
    return {"prompt_ids": prompts[0], "completions": completions, "label": label, "status": "ok", "problem": ""}


def ids_of(
    messages: list[Message], name: str, tokenizer: Any, options: Options | None = None
) -> tuple[list[int], list[int]]:
    """Ids of a conversation's prompt and of its last turn, the answer `name`, which ends with EOS; `options` go to the
    chat template."""
    check_plain(messages, tokenizer)
    ids, start = trained_ids(whole_turns(messages), tokenizer, name, options)
    return ids[:start], ids[start:]


def check_plain(messages: list[Message], tokenizer: Any) -> None:
    """Refuse (ValueError) texts to which a chat template was already applied: they begin or end with one of its
    special tokens."""
    # The tokens that the template puts around a user's message. A template may refuse a message that is none of its
    # task, so the sample is the conversation's own.
    sample = user_text = ""
    users = [message for message in messages if message["role"] == "user"]
    if users:
        sample = render_prompt(tokenizer, users[:1], add_generation_prompt=False)
        _, user_text, _ = spoken(users[0])
    ends = (tokenizer.bos_token, tokenizer.eos_token, getattr(tokenizer, "eot_token", None))
    tokens = []
    for token in tokenizer.all_special_tokens:
        if token in ends or sample.count(token) > user_text.count(token):
            tokens.append(token)
    for message in messages:
        role, text, _ = spoken(message)
        for token in tokens:
            if text.startswith(token) or text.endswith(token):
                raise ValueError(
                    f"a text of the {role} begins or ends with the special token {token}: give the text without a chat "
                    "template, which is applied here"
                )
