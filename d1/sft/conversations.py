"""Convert rows of users' data to conversations, and conversations to token ids with the exact start of the answer."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from datasets import Features, List, Value
from transformers import PreTrainedTokenizerBase

from d1.models.tokenizer import encode_prompt, render_prompt
from d1.tasks import ask

Message = dict[str, str]
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
    if not isinstance(messages, list) or not all(isinstance(message, dict) for message in messages):
        raise ValueError("messages is not a list of {role, content}")
    for message in messages:
        role = message.get("role")
        require_text(role, "a message's role")
        require_text(message.get("content"), f"the {role} message", empty_ok=role != "assistant")
    while messages and messages[-1].get("role") != "assistant":
        messages = messages[:-1]
    if len(messages) < 2:
        raise ValueError("no assistant turn follows a user turn")
    return [{"role": message["role"], "content": message["content"]} for message in messages]


def require_text(value: Any, name: str, empty_ok: bool = False) -> None:
    if not isinstance(value, str):
        raise ValueError(f"{name} is {type(value).__name__}, not text (--template turns numbers into text)")
    if not empty_ok and not value.strip():
        raise ValueError(f"{name} is empty")


def as_messages(row: Row, name: str, role: str) -> list[Message]:
    if isinstance(row[name], list):
        return row[name]
    require_text(row[name], name)
    return [{"role": role, "content": row[name]}]


def prompt_and_answer(messages: list[Message], tokenizer: PreTrainedTokenizerBase) -> tuple[str, str]:
    """The text of a conversation before its last turn, and that turn: the answer.

    The answer begins where the template's generation prompt ends, because there the model starts to write.
    """
    prompt, answer = render_prompt(tokenizer, messages[:-1], add_generation_prompt=True), messages[-1]["content"]
    whole = render_prompt(tokenizer, messages, add_generation_prompt=False)
    end = len(answer)
    if whole.startswith(prompt):  # false if the finished conversation does not contain the generation prompt
        content, answer = answer, whole[len(prompt) :]
        end = answer.find(content) + len(content) if content in answer else 0
        if whole == render_prompt(tokenizer, messages, add_generation_prompt=True):
            # Templates that ignore `add_generation_prompt`, such as LLaDA's, may add the header of the next answer.
            marks = {getattr(tokenizer, "eot_token", None), tokenizer.eos_token} - {None}
            ends = [answer.index(mark, end) + len(mark) for mark in marks if mark in answer[end:]]
            answer = answer[: min(ends, default=len(answer))]
    return prompt, answer[:end] + answer[end:].rstrip()  # whitespace between turns must not come before the EOS


def tokenize(prompt: str, answer: str, tokenizer: PreTrainedTokenizerBase) -> tuple[list[int], int]:
    """Ids of prompt and answer together, and the number of ids before the answer.

    The prompt has the same ids as when the model is asked for the answer. If the ids of the whole text begin with them,
    the rest is the answer; if a token would straddle the boundary, the answer is tokenised alone.
    """
    ids, whole = encode_prompt(tokenizer, prompt), encode_prompt(tokenizer, prompt + answer)
    new = whole[len(ids) :] if whole[: len(ids)] == ids else encode_prompt(tokenizer, answer)
    return ids + new, len(ids)


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
