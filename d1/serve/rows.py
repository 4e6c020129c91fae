"""A row of the server: what is asked for, and what its reader is told."""

from __future__ import annotations

import hashlib
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from d1.sampling.settings import SamplingSettings

KEY = re.compile(r"\d{1,9}(-\d{1,9})*")


def key_of(rid: str) -> tuple[int, ...]:
    """The key of a row's random numbers: the numbers of an `rid` such as "1-0-17", which then draws as
    `keyed_generator(seed, 1, 0, 17)` does; a hash of any other text."""
    if KEY.fullmatch(rid):
        return tuple(map(int, rid.split("-")))
    digest = hashlib.sha256(rid.encode(errors="surrogatepass")).digest()
    return tuple(int.from_bytes(digest[start : start + 4]) for start in range(0, 16, 4))


@dataclass(frozen=True)
class Completed:
    """A row that ended; lists have an entry per token of its canvas or, if it was cut short, of the first tokens."""

    ids: list[int]
    logps: list[float]
    entropies: list[float]
    reveal_steps: list[int]  # as in `Rollout`
    blocks: list[int]  # the length of each block
    passes: int
    forward_tokens: int
    weight_version: str
    cut_short: bool = False  # because the server stops


@dataclass(frozen=True)
class Revealed:
    """What one forward pass revealed in a row."""

    places: list[int]  # of the completion, from 0
    ids: list[int]
    logps: list[float]
    entropies: list[float]
    forward_tokens: int  # so far


@dataclass(frozen=True)
class Finished:
    """The blocks of a row that are full, from the first on."""

    ids: list[int]
    weight_version: str


@dataclass(frozen=True)
class Stopped:
    """A row that ends without a completion."""

    reason: str
    status: int = 503  # of HTTP


class Lane(NamedTuple):
    """What the rows that share forward passes have in common."""

    cache: str | None
    guided: bool
    own: str = ""  # names a batch of its own; "": all rows that have none share passes
    columns: int = 0  # the least width of its prompts, with their padding
    after: int = 0  # of a batch of its own: tokens of its prompts in the block where they end; `rollout` groups them


Event = Completed | Revealed | Finished | Stopped


class QueueFull(Exception):
    """More rows are waiting than the queue takes."""


@dataclass(eq=False)
class Row:
    """A completion that was asked for.

    `tell` gets its events, in the engine's thread: at the end `Completed` or `Stopped` and, before it, `Revealed` per
    forward pass if it watches "steps", `Finished` per block if it watches "steps" or "blocks".
    """

    rid: str
    ids: Sequence[int]  # of the prompt
    settings: SamplingSettings
    ends: tuple[int, ...]  # the row leaves after the block that holds one of these; none: the whole canvas is sampled
    seed: int
    tell: Callable[[Event], None] = lambda event: None
    watches: str = ""
    own: str = ""  # the batch of its own that the row belongs to, as in `Lane`
    columns: int = 0
    after: int = 0  # as in `Lane`
    number: int = -1
    told: int = field(default=0, init=False)  # tokens of full blocks

    @property
    def lane(self) -> Lane:
        return Lane(self.settings.cache, self.settings.cfg_scale > 0, self.own, self.columns, self.after)
