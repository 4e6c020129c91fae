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


def generated(row: Row, done: Completed, cut_off: bool, logprobs: bool) -> dict[str, Any]:
    """The answer of `/generate`: up to and including the first end, if it is `cut_off`; else the whole canvas."""
    end = first_end(done.ids, row.ends if cut_off else ())
    count = min(end + 1, len(done.ids))
    why: dict[str, Any] = {"type": "length", "length": count}
    if end < len(done.ids):
        why = {"type": "stop", "matched": done.ids[end]}
    meta: dict[str, Any] = {"id": row.rid, "finish_reason": why, "weight_version": done.weight_version}
    meta |= {"prompt_tokens": len(row.ids), "completion_tokens": count, "step_maps": step_map(done)[:count]}
    meta |= {"forward_passes": done.passes, "forward_tokens": done.forward_tokens}
    if logprobs:
        pairs = zip(done.logps[:count], done.ids, strict=False)
        meta["output_token_logprobs"] = [[logp, token, None] for logp, token in pairs]
        meta["output_token_entropies"] = done.entropies[:count]
    return {"output_ids": done.ids[:count], "meta_info": meta}


def step_map(done: Completed) -> list[int]:
    """The pass that revealed each token, from 1 in each block; 0 where the EOS stop filled."""
    steps, before = [], 0
    for start, end in pairwise(accumulate(done.blocks, initial=0)):
        block = done.reveal_steps[start:end]
        steps += [step - before + 1 if step >= 0 else 0 for step in block]
        before = max([before, *(step + 1 for step in block)])
    return steps


@dataclass
class Choice:
    """The text of a row, up to its first end or stop string, as it grows."""

    tokenizer: Any
    ends: Sequence[int]
    stops: Sequence[str]
    ids: list[int] = field(default_factory=list)
    text: str = ""
    reason: str | None = None  # why it ended: "stop" or "length"
    ready: int = 0  # characters that no later token changes
    sent: int = 0  # characters that were passed on

    def read(self, ids: list[int], whole: bool) -> None:
        """Takes all tokens so far; `whole`: no more come."""
        end = first_end(ids, self.ends)
        text, over = str(self.tokenizer.decode(ids[:end], skip_special_tokens=True)), whole or end < len(ids)
        if not over:
            text = text.rstrip("\ufffd")  # bytes of a character that is not whole yet
        certain = len(text) if over else begun(text, self.stops)
        self.ids, self.text = ids[:end], cut_at_stop(text, self.stops)
        if end < len(ids) or len(self.text) < min(len(text), certain + 1):
            self.reason = "stop"
        else:
            self.reason = "length" if whole else None
        self.ready = len(self.text) if self.reason else certain

    def news(self) -> str:
        """The text that can be sent now and was not sent before."""
        new, self.sent = self.text[self.sent : self.ready], max(self.sent, self.ready)
        return new


def begun(text: str, stops: Sequence[str]) -> int:
    """The first position from which the rest of `text` begins a stop string; its length if there is none."""
    first = max(0, len(text) - max(map(len, stops), default=0) + 1)
    return next((at for at in range(first, len(text)) if any(stop.startswith(text[at:]) for stop in stops)), len(text))


def usage(rows: Sequence[Row], choices: Sequence[Choice]) -> dict[str, int]:
    prompt, completion = sum(len(row.ids) for row in rows), sum(len(choice.ids) for choice in choices)
    return {"prompt_tokens": prompt, "completion_tokens": completion, "total_tokens": prompt + completion}


def envelope(name: str, model: str, rows: Sequence[Row], choices: list[Any], **more: Any) -> dict[str, Any]:
    """An answer in OpenAI's dialect; `name` is its kind of object."""
    head = {"id": f"{name}-{rows[0].rid}", "object": name, "created": int(time.time()), "model": model}
    return {**head, "choices": choices, **more}


def choice_of(index: int, text: str | None, reason: str | None, kind: str = "") -> dict[str, Any]:
    """One entry of an answer's `choices`. `kind`: "" for a text, "message" for a chat, "delta" for a piece of a
    streamed chat. A delta without text (None) is empty."""
    said: dict[str, Any] = {"text": text or ""}
    if kind:
        said = {kind: {} if text is None else {"role": "assistant", "content": text}}
    return {"index": index, **said, "logprobs": None, "finish_reason": reason}


def step_of(event: Revealed, tokenizer: Any) -> dict[str, Any]:
    """What a forward pass revealed, for the film of the chat page."""
    chips = [chip(piece(tokenizer, token)) for token in event.ids]
    values = {"places": event.positions, "tokens": chips, "logps": event.logps, "entropies": event.entropies}
    return values | {"fed": event.forward_tokens}


def server_sent(data: Any) -> str:
    return f"data: {data if isinstance(data, str) else json.dumps(data)}\n\n"
