"""The answers of the server, in SGLang's dialect and in OpenAI's, and the text of a row as it grows."""

from __future__ import annotations

import json
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import accumulate, pairwise
from typing import Any

from d1.models.tokenizer import cut_at_stop, first_end
from d1.serve.engine import Completed, Revealed, Row
from d1.show.film import chip, piece


def sglang_answer(row: Row, completed: Completed, cut_off: bool, logprobs: bool) -> dict[str, Any]:
    """The answer of `/generate`: up to and including the first end, if it is `cut_off`; else the whole canvas."""
    end = first_end(completed.ids, row.ends if cut_off else ())
    count = min(end + 1, len(completed.ids))
    finish_reason: dict[str, Any] = {"type": "length", "length": count}
    if end < len(completed.ids):
        finish_reason = {"type": "stop", "matched": completed.ids[end]}
    meta: dict[str, Any] = {
        "id": row.rid,
        "finish_reason": finish_reason,
        "weight_version": completed.weight_version,
        "prompt_tokens": len(row.ids),
        "completion_tokens": count,
        "step_maps": step_map(completed)[:count],
        "forward_passes": completed.passes,
        "forward_tokens": completed.forward_tokens,
    }
    if logprobs:
        pairs = zip(completed.logps[:count], completed.ids, strict=False)
        meta["output_token_logprobs"] = [[logp, token, None] for logp, token in pairs]
        meta["output_token_entropies"] = completed.entropies[:count]
    return {"output_ids": completed.ids[:count], "meta_info": meta}


def step_map(completed: Completed) -> list[int]:
    """The pass that revealed each token, from 1 in each block; 0 where the EOS stop filled."""
    passes = []
    first_step = 0  # of the block
    for start, end in pairwise(accumulate(completed.blocks, initial=0)):
        block = completed.reveal_steps[start:end]
        passes += [step - first_step + 1 if step >= 0 else 0 for step in block]
        first_step = max([first_step, *(step + 1 for step in block)])
    return passes


# What Transformers' `clean_up_tokenization` changes in a text; " n ' t" in two steps
CLEANED_UP = (" .", " ?", " !", " ,", " ' ", " n't", " n ' t", " 'm", " 's", " 've", " 're")


@dataclass
class Choice:
    """The text of a row, up to its first end or stop string, as it grows."""

    tokenizer: Any
    ends: Sequence[int]
    stops: Sequence[str]
    ids: list[int] = field(default_factory=list)
    text: str = ""
    reason: str | None = None  # why it ended: "stop" or "length"
    final_length: int = 0  # characters that no later token changes
    sent_length: int = 0  # characters that were passed on

    def update(self, ids: list[int], is_last: bool) -> None:
        """Takes all tokens so far; `is_last`: no more come."""
        end = first_end(ids, self.ends)
        is_complete = is_last or end < len(ids)
        text = str(self.tokenizer.decode(ids[:end], skip_special_tokens=True))
        if is_complete:
            final_length = len(text)
        else:
            text = text.rstrip("\ufffd")  # bytes of a character that is not whole yet
            replaced = [*self.stops]
            if getattr(self.tokenizer, "clean_up_tokenization_spaces", False):  # of some BERT tokenizers
                replaced += CLEANED_UP
            final_length = start_of_stop(text, replaced)
        self.ids = ids[:end]
        self.text = cut_at_stop(text, self.stops)
        if end < len(ids) or len(self.text) < min(len(text), final_length + 1):
            self.reason = "stop"
        else:
            self.reason = "length" if is_last else None
        self.final_length = len(self.text) if self.reason else final_length

    def pop_delta(self) -> str:
        """The text that can be sent now and was not sent before."""
        text = self.text[self.sent_length : self.final_length]
        self.sent_length = max(self.sent_length, self.final_length)
        return text


def start_of_stop(text: str, stops: Sequence[str]) -> int:
    """The first position from which the rest of `text` begins a stop string; its length if there is none."""
    longest_stop = max(map(len, stops), default=0)
    for position in range(max(0, len(text) - longest_stop + 1), len(text)):
        if any(stop.startswith(text[position:]) for stop in stops):
            return position
    return len(text)


def usage(rows: Sequence[Row], choices: Sequence[Choice], n: int) -> dict[str, int]:
    """The tokens of a request with `n` rows per prompt, in order; each prompt counts once, as in OpenAI's API."""
    prompt_tokens = sum(len(row.ids) for row in rows[::n])
    completion_tokens = sum(len(choice.ids) for choice in choices)
    return {
        "prompt_tokens": prompt_tokens,
        "completion_tokens": completion_tokens,
        "total_tokens": prompt_tokens + completion_tokens,
    }


def envelope(
    object_name: str, model: str, rows: Sequence[Row], choices: list[Any], **more_fields: Any
) -> dict[str, Any]:
    """An answer in OpenAI's dialect; `object_name` is its kind of object."""
    return {
        "id": f"{object_name}-{rows[0].rid}",
        "object": object_name,
        "created": int(time.time()),
        "model": model,
        "choices": choices,
        **more_fields,
    }


def choice_of(
    index: int, text: str | None, reason: str | None, kind: str = "", is_first: bool = True
) -> dict[str, Any]:
    """One entry of an answer's `choices`. `kind`: "" for a text, "message" for a chat, "delta" for a piece of a
    streamed chat. A delta without text (None) is empty; only the first one of a choice names the role, because clients
    join the values of all deltas."""
    choice: dict[str, Any] = {"index": index}
    if not kind:
        choice["text"] = text or ""
    elif text is None:
        choice[kind] = {}
    elif is_first:
        choice[kind] = {"role": "assistant", "content": text}
    else:
        choice[kind] = {"content": text}
    return choice | {"logprobs": None, "finish_reason": reason}


def step_of(event: Revealed, tokenizer: Any) -> dict[str, Any]:
    """What a forward pass revealed, for the film of the chat page."""
    return {
        "places": event.positions,
        "tokens": [chip(piece(tokenizer, token)) for token in event.ids],
        "logps": event.logps,
        "entropies": event.entropies,
        "fed": event.forward_tokens,
    }


def server_sent_event(data: Any) -> str:
    text = data if isinstance(data, str) else json.dumps(data)
    return f"data: {text}\n\n"
