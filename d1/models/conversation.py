"""Conversations that end with an assistant's turn, as text and as token ids with an exact start of that turn."""

from __future__ import annotations

from typing import Any

from transformers import PreTrainedTokenizerBase

from d1.models.tokenizer import encode_prompt, render_prompt

Message = dict[str, str]


def require_text(value: Any, name: str, empty_ok: bool = False) -> None:
    if not isinstance(value, str):
        raise ValueError(f"{name} is {type(value).__name__}, not text (in SFT, --template turns numbers into text)")
    if not empty_ok and not value.strip():
        raise ValueError(f"{name} is empty")


def as_messages(row: dict[str, Any], name: str, role: str) -> list[Message]:
    if isinstance(row[name], list):
        return row[name]
    require_text(row[name], name)
    return [{"role": role, "content": row[name]}]


def whole_turns(messages: Any) -> list[Message]:
    """The messages up to the last of the assistant.

    Raises:
        ValueError: these are no messages, or none of the assistant follows another.
    """
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
