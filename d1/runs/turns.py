"""The settings of episodes with tools: their limits, and the flags of commands that play them (`d1/tools/`)."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, fields
from typing import Annotated, Any

from d1 import extensions
from d1.models.kinds import max_positions
from d1.ranges import COUNT, POSITIVE, check_ranges, ranges_of, setting

# Names in the help of flags: the entries of `d1.tools.functions.TOOLS` and `d1.tools.calls.FORMATS`
TOOL_NAMES = ("calculator", "python")
FORMAT_NAMES = ("xml", "json", "plain")


class Formats:
    """The names of `FORMATS`, which are imported when a format is chosen."""

    def __contains__(self, name: object) -> bool:
        return name in extensions.FORMATS

    def __iter__(self) -> Iterator[str]:
        return iter(extensions.FORMATS)


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
    def from_attributes(cls, source: Any, gen_length: int, config: Any) -> TurnSettings:
        """The limits that `source` has as attributes; those that are None become 2 turns, and the room that canvases of
        `gen_length` leave in a model of this config."""
        values = {limit.name: getattr(source, limit.name) for limit in fields(cls)}
        positions = max_positions(config)
        if values["max_turn_prompt"] is None and positions is not None:
            values["max_turn_prompt"] = max(positions - gen_length, 1)
        return cls(**values | {"max_turns": values["max_turns"] or 2})


@dataclass(frozen=True, kw_only=True)
class TurnFlags:
    """Flags of every command that plays episodes."""

    tools: list[str] | None = setting(
        None,
        f"{', '.join(TOOL_NAMES)}, or .py files of functions (docs/tools.md)",
        nargs="+",
        group="turns with tools",
    )
    max_turns: Annotated[int | None, COUNT] = setting(None, "canvases per problem (default: 2 with tools)")
    tool_format: str | None = setting(
        None,
        "how calls are written (default: by the chat template)",
        choices=Formats(),
        metavar=f"{{{','.join(FORMAT_NAMES)}}}",
    )
    calls_per_turn: Annotated[int, COUNT] = setting(
        TurnSettings.calls_per_turn, "the canvas is cut after the last of them"
    )
    tool_seconds: Annotated[float, POSITIVE] = setting(
        TurnSettings.tool_seconds, "seconds per call (default: %(default)s)"
    )
    result_length: Annotated[int, COUNT] = setting(
        TurnSettings.result_length, "tokens of a result that the model reads"
    )
    max_turn_prompt: Annotated[int | None, COUNT] = setting(
        None, "longest prompt of a later turn (default: what the model has room for)"
    )


def check_turn_flags(flags: TurnFlags, edits: bool) -> None:
    """Raise ValueError for tools that are none, and for flags that contradict tools or their absence. `edits`: the
    flags of sampling ask for editing."""
    if flags.tools:
        extensions.load_tools(flags.tools)
        if edits:
            raise ValueError("--edit_threshold and --editing: editing with --tools is not supported")
        return
    if (flags.max_turns or 1) > 1:
        raise ValueError("--max_turns needs --tools, whose results make another turn")
    for flag in fields(TurnFlags):
        if flag.name not in ("tools", "max_turns") and getattr(flags, flag.name) != flag.default:
            raise ValueError(f"--{flag.name} would do nothing: there are no turns without --tools")
