"""One completion as it was sampled, for people to look at: what each place of the canvas came to hold, and when.

A `Film` is plain data. `filmed` makes one from the steps of a rollout, as they happen; `page.py`, `terminal.py` and
`flow.py` show it.
"""

from __future__ import annotations

import math
import time
import unicodedata
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from d1.sampling import Step

COLOURS = ("#f2a65a", "#f0c869", "#c9d47a", "#8fcf9a", "#5fc3b0")  # from unsure to sure, each under dark text
MASK = "░"  # a hidden place, in a terminal
HIDDEN, FILLED = -2, -1  # in place of a step: still a mask; filled without a look at it, because the text had ended


@dataclass
class Film:
    """A completion and how it came to be. Lists have an entry a place of the canvas, but for the last two.

    Attributes:
        title: which of several this is, in a word or two.
        prompt: the text before the canvas.
        note: settings, a reward or whatever else belongs below the title.
        tokens: the text of each place, as the model gave it; "" where it is hidden.
        steps: the forward pass, from 0, that revealed it, or `HIDDEN` or `FILLED`.
        logps: its log-probability in that pass. 0 where none revealed it.
        entropies: of the distribution it came from, in nats. 0 where none revealed it.
        fed: tokens that went through the model's body, up to the end of each pass. Empty where it is not known.
        seconds: that the passes took, up to the end of each, without the time they were looked at.
        drafts: of each place, [step, text, log-probability] of every token there that a later one replaced; empty where
            nothing was.
    """

    title: str
    prompt: str
    note: str
    tokens: list[str]
    steps: list[int]
    logps: list[float]
    entropies: list[float]
    fed: list[int] = field(default_factory=list)
    seconds: list[float] = field(default_factory=list)
    drafts: list[list[list[Any]]] = field(default_factory=list)

    def drafts_at(self, place: int) -> list[list[Any]]:
        return self.drafts[place] if self.drafts else []

    @property
    def passes(self) -> int:
        """Forward passes taken so far."""
        return max(len(self.fed), max(self.steps, default=-1) + 1)

    @property
    def text(self) -> str:
        """The completion so far, without what is hidden."""
        return "".join(self.tokens)

    def shown_by(self) -> list[int]:
        """After how many passes each place is seen: what no pass revealed comes with the last."""
        return [step + 1 if step >= 0 else self.passes for step in self.steps]


def filmed(
    steps: Iterable[Step], text_of: Callable[[int], str], start: int, title: str = "", prompt: str = "", note: str = ""
) -> Iterator[Film]:
    """The film of a rollout of one row: after each step the same film, longer by that step; the last one is whole.

    Args:
        steps: from `d1.sampling.rollout_steps`.
        text_of: the text of a token, e.g. `piece` of a tokenizer.
        start: the canvas's first column, which is the length of the prompt.
    """
    film, clock = Film(title, prompt, note, [], [], [], []), time.perf_counter()
    canvas: Any = None
    for step in steps:
        canvas = step.canvas
        if not film.fed:
            empty = canvas.shape[1] - start
            film.tokens, film.steps = [""] * empty, [HIDDEN] * empty
            film.logps, film.entropies = [0.0] * empty, [0.0] * empty
            film.drafts = [[] for _ in range(empty if step.most_writes > 1 else 0)]
        parts = (step.positions, step.revealed, step.ids, step.logps, step.entropies)
        for column, revealed, token, logp, entropy in zip(*(part[0].tolist() for part in parts), strict=True):
            if revealed:
                place = column - start
                if film.steps[place] >= 0:
                    film.drafts[place].append([film.steps[place], film.tokens[place], film.logps[place]])
                film.tokens[place], film.steps[place] = text_of(token), len(film.fed)
                film.logps[place], film.entropies[place] = logp, entropy
        film.fed.append(int(step.forward_tokens[0]))
        film.seconds.append(time.perf_counter() - clock + (film.seconds[-1] if film.seconds else 0.0))
        yield film
        clock = time.perf_counter()
    for place in (place for place, step in enumerate(film.steps) if step == HIDDEN):
        film.tokens[place], film.steps[place] = text_of(int(canvas[0, start + place])), FILLED
    yield film


def piece(tokenizer: Any, token: int) -> str:
    """The text of a token inside a text: with the space before it, which many tokenizers drop at a text's start."""
    alone = tokenizer.decode([token], clean_up_tokenization_spaces=False)
    return str(tokenizer.decode([token, token], clean_up_tokenization_spaces=False)[len(alone) :])


def harmless(text: str, kept: str = "\n\t") -> str:
    """A model's text for a terminal. Characters that move a cursor, turn the writing around, or are half of one are
    shown by their number, the escape that begins an ANSI code as "⟨1B⟩", unless they are `kept`."""
    shown = []
    for one in text:
        kind = unicodedata.category(one)
        acts = kind in ("Cc", "Cs", "Zl", "Zp") or (kind == "Cf" and unicodedata.bidirectional(one) != "BN")
        shown.append(f"⟨{ord(one):X}⟩" if acts and one not in kept else one)
    return "".join(shown)


def visible(text: str) -> str:
    """The same for a page or a picture, where a line's end is "↵" and the line's end."""
    return harmless(text, kept="\n").replace("\n", "↵\n")


def colour(logp: float) -> str:
    """The colour of a token's probability, from `COLOURS` in equal parts of [0, 1]."""
    return COLOURS[min(len(COLOURS) - 1, int(math.exp(min(logp, 0.0)) * len(COLOURS)))]


def chip(token: str) -> tuple[int, str, int]:
    """How a token's text is laid out: spaces before it, what is written of it, and line ends after it."""
    text = visible(token)
    breaks, text = text.count("\n"), text.replace("\n", "")
    label = text.lstrip(" ")
    return (len(text) - len(label), label, breaks) if label else (0, "␣" * len(text), breaks)
