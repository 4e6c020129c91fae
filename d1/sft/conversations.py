"""A row of anyone's data as a conversation, and a conversation as token ids with an exact start of each answer."""

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
    """A row as chat messages that end with an assistant's turn.

    The first that applies: the user's function, the user's template, s1K's columns, `messages`, `prompt`/`completion`.

    Raises:
        ValueError: the row is not usable; says why.
    """
    if function is not None:
        made = function(row)
        row = made if isinstance(made, dict) else {"messages": made}
    elif template is not None:
        cells = {name: value for name, value in row.items() if value is not None}
        row = dict(zip(("prompt", "completion"), (part.format_map(cells) for part in template), strict=True))
    elif row.keys() >= S1K:
        row = from_s1k(row)
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


def from_s1k(row: Row) -> Row:
    """s1K's columns as prompt and completion, in the form that every task's prompt asks for."""
    question, trajectories, attempt = row["question"], row["thinking_trajectories"], row["attempt"]
    require_text(question, "question")
    require_text(attempt, "attempt")
    if not isinstance(trajectories, list) or not trajectories:
        raise ValueError("thinking_trajectories is not a list with a trajectory in it")
    require_text(trajectories[0], "thinking_trajectories[0]")
    completion = f"<reasoning>{trajectories[0]}</reasoning>\n<answer>{attempt}</answer>"
    return {"prompt": ask(question, "Solve the problem.", "the answer"), "completion": completion}


def require_text(value: Any, name: str, empty_ok: bool = False) -> None:
    if not isinstance(value, str):
        raise ValueError(f"{name} is {type(value).__name__}, not text (--template makes text of numbers)")
    if not empty_ok and not value.strip():
        raise ValueError(f"{name} is empty")


def as_messages(row: Row, name: str, role: str) -> list[Message]:
    if isinstance(row[name], list):
        return row[name]
    require_text(row[name], name)
    return [{"role": role, "content": row[name]}]


def conversation_segments(
    messages: list[Message], tokenizer: PreTrainedTokenizerBase, train_on: str
) -> list[tuple[str, bool]]:
    """The text of a conversation, cut where answers begin and end: (text, is an answer), which add up to the whole.

    An answer begins where the template's generation prompt ends: where a model that is asked for it starts to write.
    """

    def render(turns: list[Message], ask_for_answer: bool) -> str:
        return render_prompt(tokenizer, turns, add_generation_prompt=ask_for_answer)

    last = len(messages) - 1
    first = 1 if train_on == "all" else last  # a greeting before any question answers nothing
    segments: list[tuple[str, bool]] = []
    text = ""
    for turn in range(first, last + 1):
        if messages[turn]["role"] != "assistant":
            continue
        prompt, content = render(messages[:turn], True), messages[turn]["content"]
        if not prompt.startswith(text):
            raise ValueError("the chat template rewrites earlier turns when later ones follow: use --train_on last")
        whole = render(messages[: turn + 1], False)
        if whole.startswith(prompt):
            answer = whole[len(prompt) :]
            if whole == render(messages[: turn + 1], True):
                answer = first_turn(answer, content, tokenizer)
        elif turn == last:  # a template whose generation prompt is not in the finished conversation
            answer = content
        else:
            raise ValueError("the chat template's generation prompt is not in the conversation: use --train_on last")
        if turn == last:  # what a template puts between turns (a newline) has no place before the EOS
            end = end_of(content, answer)
            answer = answer[:end] + answer[end:].rstrip()
        segments += [(prompt[len(text) :], False), (answer, True)]
        text = prompt + answer
    return segments


def end_of(content: str, answer: str) -> int:
    return answer.find(content) + len(content) if content in answer else 0


def first_turn(answer: str, content: str, tokenizer: PreTrainedTokenizerBase) -> str:
    """`answer` up to the token that ends its turn.

    Templates that do not ask whether an answer is wanted, such as LLaDA's, may add the header of the next answer.
    """
    after = end_of(content, answer)
    marks = {getattr(tokenizer, "eot_token", None), tokenizer.eos_token} - {None}
    ends = [answer.index(mark, after) + len(mark) for mark in marks if mark in answer[after:]]
    return answer[: min(ends, default=len(answer))]


def tokenize_segments(
    segments: list[tuple[str, bool]], tokenizer: PreTrainedTokenizerBase
) -> tuple[list[int], list[bool]]:
    """Ids of the whole text and, for each, whether it belongs to an answer.

    The ids before an answer are those of the text before it alone, as when a model is asked for the answer. Where the
    ids of the whole text begin with them, the answer has the rest; where a token would straddle the boundary, the
    answer is tokenised by itself.
    """

    text = ""
    ids: list[int] = []
    answer: list[bool] = []
    for piece, is_answer in segments:
        text += piece
        whole = encode_prompt(tokenizer, text)
        new = whole[len(ids) :] if whole[: len(ids)] == ids else encode_prompt(tokenizer, piece)
        ids, answer = ids + new, answer + [is_answer] * len(new)
    return ids, answer


def tokenize_row(
    row: Row,
    tokenizer: PreTrainedTokenizerBase,
    max_length: int,
    overlong: str,
    train_on: str,
    function: Callable[[Row], Any] | None,
    template: tuple[str, str] | None,
) -> Row:
    """One row of `FEATURES`: `status` is "ok", "truncated", "dropped" or "bad", and `problem` says what is wrong."""
    none = {"input_ids": [], "answer": [], "length": 0, "start": 0, "problem": ""}
    try:
        messages = to_messages(row, function, template)
        ids, answer = tokenize_segments(conversation_segments(messages, tokenizer, train_on), tokenizer)
        if tokenizer.mask_token_id in ids:
            raise ValueError(f"the mask token {tokenizer.mask_token} is in the text")
        if not any(answer):
            raise ValueError("the answer has no tokens")
        if ids[-1] != tokenizer.eos_token_id:
            ids, answer = [*ids, tokenizer.eos_token_id], [*answer, True]
        start = len(answer) - answer[::-1].index(False) if False in answer else 0
        status = "ok"
        if len(ids) > max_length:
            if overlong == "refuse":
                raise ValueError(f"{len(ids)} tokens are more than --max_length {max_length}")
            if overlong == "drop":
                return none | {"status": "dropped"}
            if not any(answer[:max_length]):
                prompt = answer.index(True)
                raise ValueError(f"no answer tokens left: the prompt has {prompt}, --max_length is {max_length}")
            ids, answer, status = ids[:max_length], answer[:max_length], "truncated"
    except Exception as error:  # templates and users' functions may raise anything; the row is what is wrong
        kind = "" if isinstance(error, ValueError) else f"{type(error).__name__}: "
        kind = "there is no " if isinstance(error, KeyError) else kind
        return none | {"status": "bad", "problem": f"{kind}{error}"}
    return none | {"input_ids": ids, "answer": answer, "length": len(ids), "start": start, "status": status}
