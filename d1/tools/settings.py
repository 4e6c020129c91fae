"""The limits of an episode."""

from __future__ import annotations

from dataclasses import dataclass, fields
from typing import Annotated, Any

from d1.ranges import COUNT, POSITIVE, check_ranges, ranges_of


@dataclass(frozen=True)
class TurnSettings:
    """The limits of an episode.

    Attributes:
        max_turns: canvases per episode.
        calls_per_turn: calls in a canvas; it is cut after the last one.
        tool_seconds: for one call.
        result_length: tokens of a result; the rest is cut off.
        max_turn_prompt: the longest prompt of a later turn, in tokens; None: any.
    """

    max_turns: Annotated[int, COUNT] = 2
    calls_per_turn: Annotated[int, COUNT] = 1
    tool_seconds: Annotated[float, POSITIVE] = 10.0
    result_length: Annotated[int, COUNT] = 256
    max_turn_prompt: Annotated[int | None, COUNT | None] = None

    def __post_init__(self) -> None:
        check_ranges(vars(self), ranges_of(TurnSettings))

    @classmethod
    def of(cls, source: Any, gen_length: int, config: Any) -> TurnSettings:
        """The limits that `source` has as attributes; those that are None become 2 turns, and the room that canvases of
        `gen_length` leave in a model of this config."""
        values = {one.name: getattr(source, one.name) for one in fields(cls)}
        positions = getattr(config, "max_position_embeddings", None)
        if values["max_turn_prompt"] is None and positions is not None:
            values["max_turn_prompt"] = max(positions - gen_length, 1)
        return cls(**values | {"max_turns": values["max_turns"] or 2})
