"""The routes: SGLang's, OpenAI's, metrics and a chat page. A new route is a function in one of the routers.

The rows of a request stop when its client leaves.
"""

import asyncio
import hmac
import json
from collections.abc import AsyncIterator, Awaitable
from contextlib import asynccontextmanager
from functools import partial
from pathlib import Path
from typing import Any

from d1.files import valid_unicode
from d1.models.adapters import base_digest
from d1.runs.cli import one_line
from d1.serve.answers import Choice, choice_of, envelope, sglang_answer, usage
from d1.serve.engine import QueueFull, Stopped, weights_below
from d1.serve.requests import (
    ANYTHING,
    NEUTRAL,
    Chat,
    Completion,
    Generate,
    Pause,
    Server,
    Update,
    complete_rows,
    stream_rows,
)
from d1.show.page import film_page

OPEN_PATHS = ("/", "/health")  # without the API key
MAX_BODY_BYTES = 8 << 20
BODY_SECONDS = 60.0  # in which the body of a request arrives
PAGE_FOLDER = Path(__file__).parent
STATUS: dict[type[Exception], int] = {
    LookupError: 404,
    QueueFull: 429,
    ValueError: 400,
    ConnectionError: 503,
    Stopped: 503,
}


# FastAPI is optional, so the functions below import it. It reads the annotations of routes, which must not be strings,
# so this file has no `from __future__ import annotations`.


def make_app(server: Server) -> Any:
    """The ASGI application, which starts the engine's thread and ends it."""
    from fastapi import FastAPI

    @asynccontextmanager
    async def lifespan(app: Any) -> AsyncIterator[None]:
        server.engine.thread.start()
        yield
        await asyncio.to_thread(server.engine.close)

    app = FastAPI(lifespan=lifespan, docs_url=None, redoc_url=None, openapi_url=None)
    add_refusals(app)
    for router in (sglang_routes(server), openai_routes(server), pages(server)):
        app.include_router(router)
    return Gate(server, app)


def refusal(status: int, message: str) -> Any:
    """An answer that says what was wrong, in OpenAI's form."""
    from fastapi.responses import JSONResponse

    kind = "server_error" if status >= 500 else "invalid_request_error"
    headers = {408: {"Connection": "close"}, 429: {"Retry-After": "1"}}.get(status)
    message = valid_unicode(message)  # it may quote the request
    return JSONResponse({"error": {"message": message, "type": kind, "param": None, "code": status}}, status, headers)


def add_refusals(app: Any) -> None:
    """Turns errors of the routes into refusals: 4xx for a user's mistake, 429 for a full queue, 503 at the end."""
    from fastapi.exceptions import RequestValidationError
    from starlette.exceptions import HTTPException

    def refuse_error(request: Any, error: Exception) -> Any:
        status = getattr(error, "status", None)
        if not status:
            statuses = [STATUS[kind] for kind in STATUS if isinstance(error, kind)]
            status = statuses[0] if statuses else 500
        return refusal(status, one_line(error))

    for kind in (*STATUS, Exception):
        app.add_exception_handler(kind, refuse_error)

    @app.exception_handler(RequestValidationError)
    def refuse_fields(request: Any, error: RequestValidationError) -> Any:
        return refusal(400, "; ".join(map(message_of, error.errors()[:3])))

    @app.exception_handler(HTTPException)
    def refuse_route(request: Any, error: HTTPException) -> Any:
        return refusal(error.status_code, str(error.detail))


def message_of(error: dict[str, Any]) -> str:
    """What is wrong with a field of a body, after the place of the field."""
    field = ".".join(map(str, error["loc"][1:])) or "body"
    if error["type"] == "json_invalid":
        return f"body: not JSON at character {field}: {error['ctx']['error']}"
    if error["type"] != "extra_forbidden":
        return f"{field}: {error['msg'].removeprefix('Value error, ')}"
    accepted = [json.dumps(value) for value in NEUTRAL.get(field, ()) if value is not ANYTHING]
    advice = f"leave it out, or send {' or '.join(accepted)}" if accepted else "leave it out"
    return f"{field}: not supported here with the value {error['input']!r:.80}: {advice}"


async def answer_unless_disconnected(request: Any, make_answer: Awaitable[Any]) -> Any:
    """The result of `make_answer`; status 499, and `make_answer` is cancelled, if the client leaves before it is
    there."""
    from fastapi.responses import Response

    async def wait_for_disconnect() -> None:
        while (await request.receive())["type"] != "http.disconnect":
            pass

    answer = asyncio.ensure_future(make_answer)
    disconnect = asyncio.ensure_future(wait_for_disconnect())
    try:
        await asyncio.wait([answer, disconnect], return_when=asyncio.FIRST_COMPLETED)
        return answer.result() if answer.done() else Response(status_code=499)
    finally:
        answer.cancel()
        disconnect.cancel()


def sglang_routes(server: Server) -> Any:
    """SGLang's routes: rows for RL, weights, pauses."""
    from fastapi import APIRouter, Request
    from fastapi.responses import JSONResponse, Response

    router = APIRouter()
    engine = server.engine
    base = base_digest(engine.model)  # of the model that the server was started from, to which adapters are added

    @router.get("/health")
    async def health() -> Any:
        return Response(status_code=200 if engine.thread.is_alive() else 503)

    @router.get("/model_info")
    async def model_info() -> Any:
        return {
            "model_path": server.name,
            "weight_version": engine.version,
            "mask_token_id": engine.mask_token_id,
            "dtype": str(engine.model.dtype).removeprefix("torch."),
            "base": base,
            "weights_dir": [str(folder.resolve()) for folder in server.weights_dir],
        }

    @router.post("/generate")
    async def generate(body: Generate, request: Request) -> Any:
        rows = await asyncio.to_thread(server.rows_to_generate, body)

        def make_response(events: list[Any]) -> Any:
            cut_off = not body.sampling_params.ignore_eos
            answers = []
            for row, completed in zip(rows, events, strict=True):
                answers.append(sglang_answer(row, completed, cut_off, logprobs=body.return_logprob))
            has_list = isinstance(body.input_ids[0], list) or len(rows) > 1
            return JSONResponse(answers if has_list else answers[0])

        async def sample() -> Any:
            events = await complete_rows(engine, rows)
            return await asyncio.to_thread(make_response, events)

        return await answer_unless_disconnected(request, sample())

    @router.post("/update_weights_from_disk")
    async def update_weights_from_disk(body: Update) -> Any:
        try:
            folder = await asyncio.to_thread(weights_below, server.weights_dir, body.model_path)
            assert server.loader is not None
            load = partial(server.loader.load, folder)
            update = engine.replace_model(load, body.weight_version or str(folder), source=str(folder))
            await asyncio.shield(asyncio.wrap_future(update))  # it continues if the client leaves
        except Exception as error:
            statuses = {QueueFull: 429, ConnectionError: 503}
            return JSONResponse({"success": False, "message": one_line(error)}, statuses.get(type(error), 400))
        return {"success": True, "message": f"the weights are those of {folder}"}

    @router.post("/pause_generation")
    async def pause_generation(body: Pause) -> Any:
        engine.pause()
        return {"status": "ok", "mode": body.mode}

    @router.post("/continue_generation")
    async def continue_generation() -> Any:
        engine.resume()
        return {"status": "ok"}

    return router


def openai_routes(server: Server) -> Any:
    """OpenAI's routes: completions and chats, whole or streamed."""
    from fastapi import APIRouter, Request
    from fastapi.responses import StreamingResponse

    router = APIRouter()
    model_card = {"id": server.name, "object": "model", "created": 0, "owned_by": "d1"}

    @router.get("/v1/models")
    async def models() -> Any:
        return {"object": "list", "data": [model_card]}

    @router.get("/v1/models/{name:path}")
    async def model(name: str) -> Any:
        if not name:  # a slash at the end
            return await models()
        if name != server.name:
            raise LookupError(f"the model {name!r:.200} is not served here: this is {server.name!r}")
        return model_card

    @router.post("/v1/completions")
    async def complete(body: Completion, request: Request) -> Any:
        return await openai(body, request, "text_completion")

    @router.post("/v1/chat/completions")
    async def chat(body: Chat, request: Request) -> Any:
        return await openai(body, request, "chat.completion")

    async def openai(body: Any, request: Request, object_name: str) -> Any:
        """The answer in OpenAI's dialect, streamed or whole; `object_name` is its kind of object."""
        rows = await asyncio.to_thread(server.rows_of_openai, body)
        choices = [Choice(server.tokenizer, row.ends, body.stops) for row in rows]
        if body.stream:
            with_usage = bool((body.stream_options or {}).get("include_usage"))
            events = stream_rows(server, rows, choices, object_name, body.n if with_usage else None)
            first_event = await anext(events)  # a full queue is answered by 429, before the stream begins

            async def all_events() -> AsyncIterator[str]:
                yield first_event
                async for event in events:
                    yield event

            headers = {"Cache-Control": "no-store"}
            return StreamingResponse(all_events(), media_type="text/event-stream", headers=headers)

        async def sample() -> Any:
            await complete_rows(server.engine, rows, choices)
            kind = "message" if object_name.startswith("chat") else ""
            entries = [choice_of(index, choice.text, choice.reason, kind) for index, choice in enumerate(choices)]
            return envelope(object_name, server.name, rows, entries, usage=usage(rows, choices, body.n))

        return await answer_unless_disconnected(request, sample())

    return router


def pages(server: Server) -> Any:
    """The chat page for people, and the numbers for Prometheus."""
    from fastapi import APIRouter
    from fastapi.responses import HTMLResponse, PlainTextResponse

    router = APIRouter()
    engine = server.engine
    html = (PAGE_FOLDER / "chat.html").read_text(encoding="utf-8")
    script = (PAGE_FOLDER / "chat.js").read_text(encoding="utf-8")
    page = film_page(server.name, [], html, script)

    @router.get("/")
    async def chat_page() -> Any:
        return HTMLResponse(page)

    @router.get("/metrics")
    async def metrics() -> Any:
        numbers = {
            "rows_waiting": len(engine.waiting),
            "rows_at_work": len(engine.rows),
            "forward_passes_total": engine.passes,
            "row_passes_total": engine.row_passes,  # rows, summed over forward passes
            "tokens_total": engine.tokens,  # of canvases that ended
        }
        return PlainTextResponse("".join(f"d1_{name} {value}\n" for name, value in numbers.items()))

    return router


def receive_in_time(receive: Any) -> Any:
    """The function `receive` of a request (ASGI), which raises 408 if the body has not arrived in `BODY_SECONDS`."""
    from starlette.exceptions import HTTPException

    deadline: float | None = asyncio.get_running_loop().time() + BODY_SECONDS

    async def receive_message() -> Any:
        nonlocal deadline
        try:
            async with asyncio.timeout_at(deadline):
                message = await receive()
        except TimeoutError:
            raise HTTPException(408, f"the body has not arrived in {BODY_SECONDS:.0f} seconds") from None
        if not message.get("more_body"):
            deadline = None  # the next message comes when the client leaves
        return message

    return receive_message


class Gate:
    """Checks the headers of a request before its body is read, and limits the time that this takes (ASGI)."""

    def __init__(self, server: Server, app: Any) -> None:
        self.server = server
        self.app = app

    def refuse(self, scope: Any) -> Any:
        """The refusal of a request by its headers; None if it may pass."""
        headers = dict(scope["headers"])
        key = self.server.api_key
        host = headers.get(b"host", b"").decode("latin-1")
        is_other_host = not key and not self.server.is_called(host)  # a page of another site, say
        authorization = headers.get(b"authorization", b"")
        expected = f"Bearer {key}".encode()
        lacks_key = key and scope["path"] not in OPEN_PATHS and not hmac.compare_digest(authorization, expected)
        lacks_length = b"transfer-encoding" in headers
        is_too_large = int(headers.get(b"content-length", b"0")) > MAX_BODY_BYTES
        content_type = headers.get(b"content-type", b"").partition(b";")[0].strip().lower()
        # Browsers let no other site's page send JSON.
        is_other_type = scope["method"] == "POST" and content_type != b"application/json"
        if is_other_host:
            return refusal(400, f"the header Host: {host[:200]} does not name this server: --allowed_hosts adds names")
        if lacks_key:
            return refusal(401, "this server asks for its API key, as Authorization: Bearer KEY")
        if lacks_length:
            return refusal(411, "a body needs a Content-Length")
        if is_too_large:
            return refusal(413, f"a body has at most {MAX_BODY_BYTES} bytes")
        if is_other_type:
            return refusal(415, "a POST needs the header Content-Type: application/json, also without a body")
        return None

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        response = None
        if scope["type"] == "http":
            response = self.refuse(scope)
            receive = receive_in_time(receive)
        if response is None:
            response = self.app
        await response(scope, receive, send)
