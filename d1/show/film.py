"""How one completion was sampled, for people to look at: which token each position got, and in which step.

A `Film` is plain data. `filmed` makes one from the steps of a rollout while it runs; `page.py` and `terminal.py` show
it.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from d1.files import harmless

if TYPE_CHECKING:
    from d1.sampling import Step

COLOURS = ("#f2a65a", "#f0c869", "#c9d47a", "#8fcf9a", "#5fc3b0")  # from unsure to sure, each a ground for dark text
MASK = "░"  # a hidden position, in a terminal
# In place of a step: given text between two turns; still a mask; filled without a prediction, as the text had ended.
GIVEN, HIDDEN, FILLED = -3, -2, -1


@dataclass
class Film:
    """A completion and how it was sampled. Lists of tokens have one value per position of the canvas."""

    title: str  # a word or two that distinguish this film from others
    prompt: str  # the text before the canvas
    note: str  # settings, a reward or anything else to show below the title
    tokens: list[str]  # the text of each position, as the model gave it; "" if it is hidden
    steps: list[int]  # the forward pass, counted from 0, that revealed it, or `GIVEN`, `HIDDEN` or `FILLED`
    logps: list[float]  # its log-probability in that pass; 0 if no pass revealed it
    entropies: list[float]  # of its distribution in that pass, in nats; 0 if no pass revealed it
    fed: list[int] = field(default_factory=list)  # tokens processed up to the end of each pass; empty if unknown
    seconds: list[float] = field(default_factory=list)  # up to the end of each pass, without the time for display
    solved: bool | None = None  # whether the completion solves its problem; None if it has no problem
    # Of each position, [step, text, log-probability, step that replaced it by another token or hid it] of every token
    # that did not stay; empty without edits. Films of earlier versions lack the last number.
    drafts: list[list[list[Any]]] = field(default_factory=list)

    def drafts_at(self, position: int) -> list[list[Any]]:
        return self.drafts[position] if self.drafts else []

    def hide(self, position: int) -> None:
        """Hides a token again, which becomes a draft."""
        draft = [self.steps[position], self.tokens[position], self.logps[position], len(self.fed)]
        self.drafts[position].append(draft)
        self.tokens[position] = ""
        self.steps[position] = HIDDEN
        self.logps[position] = 0.0
        self.entropies[position] = 0.0

    @property
    def passes(self) -> int:
        """Forward passes taken so far."""
        return max(len(self.fed), max(self.steps, default=-1) + 1)

    @property
    def text(self) -> str:
        """The completion so far, without hidden positions."""
        return "".join(self.tokens)

    def shown_by(self) -> list[int]:
        """The number of passes after which each position is shown; those that no pass revealed come with the last, and
        given text with what is before it."""
        shown: list[int] = []
        for step in self.steps:
            if step >= 0:
                shown.append(step + 1)
            elif step == GIVEN:
                shown.append(max(shown, default=0))
            else:
                shown.append(self.passes)
        return shown

    def followed(self, turn: Film, length: int, given_tokens: Sequence[str] = ()) -> Film:
        """The film of an episode with one more turn: the first `length` tokens of the turn's film, and given text."""
        passes = self.passes
        steps = [step + passes if step >= 0 else step for step in turn.steps[:length]]
        given = len(given_tokens)
        processed_before = self.fed[-1] if self.fed else 0
        seconds_before = self.seconds[-1] if self.seconds else 0.0
        return replace(
            self,
            tokens=[*self.tokens, *turn.tokens[:length], *given_tokens],
            steps=[*self.steps, *steps, *[GIVEN] * given],
            logps=[*self.logps, *turn.logps[:length], *[0.0] * given],
            entropies=[*self.entropies, *turn.entropies[:length], *[0.0] * given],
            fed=[*self.fed, *(processed_before + tokens for tokens in turn.fed)],
            seconds=[*self.seconds, *(seconds_before + seconds for seconds in turn.seconds)],
        )


Judge = Callable[[Film, Sequence[int]], None]


def filmed(
    steps: Iterable[Step],
    text_of: Callable[[int], str],
    start: int,
    title: str = "",
    prompt: str = "",
    note: str = "",
    judge: Judge | None = None,
) -> Iterator[Film]:
    """Yields the film of a rollout of one row after each step: always the same film, extended by that step.

    Args:
        steps: from `d1.sampling.rollout_steps`.
        text_of: the text of a token, e.g. `piece` of a tokenizer.
        start: the index of the canvas's first token in the text, which is the length of the prompt.
        judge: called at the end with the film and the canvas_ids, e.g. from `judge_of`.
    """
    film = Film(title, prompt, note, tokens=[], steps=[], logps=[], entropies=[])
    clock = time.perf_counter()
    canvas: Any = None
    passes = 0
    for step in steps:
        canvas = step.canvas
        if not film.tokens:
            length = canvas.shape[1] - start
            film.tokens = [""] * length
            film.steps = [HIDDEN] * length
            film.logps = [0.0] * length
            film.entropies = [0.0] * length
            if step.max_writes > 1:
                film.drafts = [[] for _ in range(length)]

        # With uniform noise, the first step of a canvas is no pass. It writes noise, which is not shown.
        passes_before, passes = passes, int(step.passes[0])
        if passes == passes_before:
            continue

        # A step lists the tokens that its pass predicted, by index in the text; `revealed` says which of them it wrote,
        # and `noised` which it replaced by noise or, in the last pass of a canvas, by its output.
        if step.noised is not None:
            columns = [column[0].tolist() for column in (step.positions, step.noised, step.ids)]
            for index, noised, token in zip(*columns, strict=True):
                position = index - start
                if noised and film.steps[position] >= 0 and text_of(token) != film.tokens[position]:
                    film.hide(position)
        columns = [
            column[0].tolist() for column in (step.positions, step.revealed, step.ids, step.logps, step.entropies)
        ]
        for index, revealed, token, logp, entropy in zip(*columns, strict=True):
            if not revealed:
                continue
            position = index - start
            if film.steps[position] >= 0:  # an edit
                film.hide(position)
            film.tokens[position] = text_of(token)
            film.steps[position] = len(film.fed)
            film.logps[position] = logp
            film.entropies[position] = entropy
        film.fed.append(int(step.forward_tokens[0]))
        film.seconds.append(time.perf_counter() - clock + (film.seconds[-1] if film.seconds else 0.0))
        yield film
        clock = time.perf_counter()  # what the caller does between two steps is no part of a pass

    # The positions that no pass revealed.
    canvas_ids = canvas[0, start:].tolist()
    for position, number in enumerate(film.steps):
        if number == HIDDEN:
            film.tokens[position] = text_of(canvas_ids[position])
            film.steps[position] = FILLED
    if judge is not None:
        judge(film, canvas_ids)
    yield film


def judge_of(task: Any, row: Mapping[str, Any], tokenizer: Any, ends: Sequence[int]) -> Judge:
    """Sets `solved` of a film of the task's `row`, from the text up to the first of the ids `ends`."""

    def judge(film: Film, canvas_ids: Sequence[int]) -> None:
        end = next((position for position, token in enumerate(canvas_ids) if token in ends), len(canvas_ids))
        text = tokenizer.decode(canvas_ids[:end], skip_special_tokens=True)
        film.solved = next(iter(task.score(text, row).values())) == 1

    return judge


def verdict(film: Film) -> str:
    if film.solved is None:
        return ""
    return "solved" if film.solved else "not solved"


def without_folders(value: Any) -> str:
    """A setting as text; an absolute path is only its last part, so that a page names no folder of this machine."""
    if isinstance(value, str | Path) and Path(value).is_absolute():
        return Path(value).name
    return str(value)


def labels_of(folders: Sequence[Path]) -> list[str]:
    """The names of folders, with as many folders above them as make them different."""
    parts = [folder.resolve().parts for folder in folders]
    labels: list[str] = []
    for count in range(1, max(map(len, parts)) + 1):
        labels = ["/".join(names[-count:]) for names in parts]
        if len({*labels}) == len({*parts}):
            break
    return labels


def piece(tokenizer: Any, token: int) -> str:
    """The text of a token inside a longer text: with the space before it, which many tokenizers drop at the start."""
    single = tokenizer.decode([token], clean_up_tokenization_spaces=False)
    double = tokenizer.decode([token, token], clean_up_tokenization_spaces=False)
    return str(double[len(single) :])


def visible(text: str) -> str:
    """`harmless` for a page or a picture, where a line end is shown as "↵" before the line end."""
    return harmless(text, allowed="\n").replace("\n", "↵\n")


def colour(logp: float) -> str:
    """The colour of a token's probability: `COLOURS` divide [0, 1] into equal parts."""
    if math.isnan(logp):  # of a damaged model, whose rollout ends with an error
        return COLOURS[0]
    return COLOURS[min(len(COLOURS) - 1, int(math.exp(min(logp, 0.0)) * len(COLOURS)))]


def chip(token: str) -> tuple[int, str, int]:
    """The layout of a token's text: number of spaces before it, its label, and number of line ends after it."""
    text = visible(token)
    breaks = text.count("\n")
    text = text.replace("\n", "")
    label = text.lstrip(" ")
    if not label:
        return 0, "␣" * len(text), breaks
    return len(text) - len(label), label, breaks
