"""From the engine's thread to the event loop: rows that somebody waits for."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Sequence
from contextlib import aclosing
from functools import partial
from typing import Any

from d1.serve.answers import Choice, chunk_choice, envelope, server_sent, step_of, usage
from d1.serve.engine import Engine
from d1.serve.requests import Server
from d1.serve.rows import Completed, Event, Finished, Revealed, Row, Stopped


class RowsStopped(Exception):
    """A row ended without a completion; `status` is of HTTP."""

    def __init__(self, event: Stopped) -> None:
        super().__init__(event.reason)
        self.status = event.status


Events = asyncio.Queue[tuple[int, Event]]  # each with the number of its row


def submit(engine: Engine, rows: Sequence[Row]) -> Events:
    """Hands rows to the engine; their events come to the running loop. Raises QueueFull."""
    events: Events = asyncio.Queue()
    loop = asyncio.get_running_loop()

    def tell(index: int, event: Event) -> None:
        loop.call_soon_threadsafe(events.put_nowait, (index, event))

    for index, row in enumerate(rows):
        row.tell = partial(tell, index)
    engine.submit(rows)
    return events


async def read(
    engine: Engine, rows: Sequence[Row], events: Events, choices: Sequence[Choice] = ()
) -> AsyncGenerator[tuple[int, Event]]:
    """The events of submitted rows, after the choices have read them, until all rows have ended. Rows that nobody reads
    any more, or that have a stop string, are dropped.

    Raises:
        RowsStopped: a row ended without a completion.
    """
    over: set[int] = set()
    try:
        while len(over) < len(rows):
            index, event = await events.get()
            if index in over:
                continue
            if isinstance(event, Stopped):
                raise RowsStopped(event)
            if choices and isinstance(event, Completed):
                choices[index].read(event.ids, True, event.cut_short)
            elif choices and isinstance(event, Finished):
                choices[index].read(event.ids, False)
            if isinstance(event, Completed) or (choices and choices[index].reason):
                over.add(index)
                engine.drop([rows[index]])
            yield index, event
    finally:
        engine.drop(rows)


async def completed(engine: Engine, rows: Sequence[Row], choices: Sequence[Choice] = ()) -> list[Any]:
    """The last event of each row, after the choices have read it. Raises QueueFull or RowsStopped."""
    last: list[Any] = [None] * len(rows)
    async with aclosing(read(engine, rows, submit(engine, rows), choices)) as events:
        async for index, event in events:
            last[index] = event
    return last


async def streamed(
    server: Server, rows: Sequence[Row], choices: Sequence[Choice], name: str, with_usage: bool
) -> AsyncGenerator[str]:
    """The server-sent events of OpenAI's streams. What a pass revealed is a chunk without text, with a `step`. A row
    that began again with other weights, after some of its text was passed on, ends the stream with an error."""
    chat = name.startswith("chat")
    versions: dict[int, str] = {}  # of the weights that gave what was passed on
    head = partial(envelope, f"{name}.chunk" if chat else name, server.name, rows)
    async with aclosing(read(server.engine, rows, submit(server.engine, rows), choices)) as events:
        yield server_sent(head([chunk_choice(index, "", None, chat) for index in range(len(rows))]))
        try:
            async for index, event in events:
                choice = choices[index]
                if isinstance(event, Revealed):
                    step = step_of(event, server.tokenizer) | {"length": rows[index].settings.gen_length}
                    yield server_sent(head([chunk_choice(index, None, None, chat)], step=step))
                    continue
                assert isinstance(event, Completed | Finished)
                version = versions.get(index, event.weight_version)
                if event.weight_version != version:
                    raise RowsStopped(Stopped("the weights changed in the middle of this stream: ask again"))
                if (new := choice.news()) or choice.reason:
                    versions[index] = version
                    yield server_sent(head([chunk_choice(index, new, choice.reason, chat)]))
        except RowsStopped as error:
            yield server_sent({"error": {"message": str(error), "code": error.status}})
            return
    if with_usage:
        yield server_sent(head([], usage=usage(rows, choices)))
    yield server_sent("[DONE]")
