"""Convert rows of users' data to conversations, and conversations to token ids with the exact start of the answer."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from datasets import Features, List, Value
from transformers import PreTrainedTokenizerBase

from d1.models.tokenizer import Message, as_messages, prompt_and_answer, require_text, tokenize, whole_turns
from d1.tasks import ask

Row = dict[str, Any]

S1K = {"question", "thinking_trajectories", "attempt"}
FEATURES = Features(
    {
        "input_ids": List(Value("int32")),
        "answer": List(Value("bool")),
        "length": Value("int32"),
        "start": Value("int32"),
        "status": Value("string"),
        "problem": Value("string"),
    }
)


def to_messages(row: Row, function: Callable[[Row], Any] | None, template: tuple[str, str] | None) -> list[Message]:
    """Converts a row to chat messages that end with an assistant's turn.

    Uses the first of these that applies: the user's function, the user's template, s1K's columns (in the format that
    every task's prompt asks for), `messages`, `prompt` and `completion`.

    Raises:
        ValueError: the row cannot be used; says why.
    """
    if function is not None:
        made = function(row)
        row = made if isinstance(made, dict) else {"messages": made}
    elif template is not None:
        cells = {name: value for name, value in row.items() if value is not None}
        row = dict(zip(("prompt", "completion"), (part.format_map(cells) for part in template), strict=True))
    elif row.keys() >= S1K:
        if not isinstance(row["thinking_trajectories"], list) or not row["thinking_trajectories"]:
            raise ValueError("thinking_trajectories is not a list with at least one trajectory")
        parts = (row["question"], row["thinking_trajectories"][0], row["attempt"])
        for part, name in zip(parts, ("question", "thinking_trajectories[0]", "attempt"), strict=True):
            require_text(part, name)
        completion = f"<reasoning>{parts[1]}</reasoning>\n<answer>{parts[2]}</answer>"
        row = {"prompt": ask(parts[0], "Solve the problem.", "the answer"), "completion": completion}
    if "messages" in row:
        messages = row["messages"]
    else:
        messages = as_messages(row, "prompt", "user") + as_messages(row, "completion", "assistant")
    return whole_turns(messages)


def tokenize_row(
    row: Row,
    tokenizer: PreTrainedTokenizerBase,
    max_length: int,
    overlong: str,
    function: Callable[[Row], Any] | None,
    template: tuple[str, str] | None,
) -> Row:
    """One row of `FEATURES`: `status` is "ok", "truncated", "dropped" or "bad", and `problem` says what is wrong."""
    none = {"input_ids": [], "answer": [], "length": 0, "start": 0, "problem": ""}
    try:
        messages = to_messages(row, function, template)
        ids, start = tokenize(*prompt_and_answer(messages, tokenizer), tokenizer)
        if tokenizer.mask_token_id in ids:
            raise ValueError(f"the mask token {tokenizer.mask_token} is in the text")
        if start == len(ids):
            raise ValueError("the answer has no tokens")
        if ids[-1] != tokenizer.eos_token_id:
            ids = [*ids, tokenizer.eos_token_id]
        status = "ok"
        if len(ids) > max_length:
            if overlong == "refuse":
                raise ValueError(f"{len(ids)} tokens are more than --max_length {max_length}")
            if overlong == "drop":
                return none | {"status": "dropped"}
            if start >= max_length:
                raise ValueError(f"no answer tokens left: the prompt has {start}, --max_length is {max_length}")
            ids, status = ids[:max_length], "truncated"
    except Exception as error:  # templates and users' functions may raise anything; the row is reported as bad
        kind = "" if isinstance(error, ValueError) else f"{type(error).__name__}: "
        kind = "there is no " if isinstance(error, KeyError) else kind
        return none | {"status": "bad", "problem": f"{kind}{error}"}
    answer = [place >= start for place in range(len(ids))]
    return none | {"input_ids": ids, "answer": answer, "length": len(ids), "start": start, "status": status}
