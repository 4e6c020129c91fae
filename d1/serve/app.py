"""The routes: SGLang's, OpenAI's, metrics and a chat page. A request's rows stop when its client leaves."""

import asyncio
import hmac
import html
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from concurrent.futures import Future
from contextlib import asynccontextmanager, suppress
from functools import partial
from pathlib import Path
from typing import Any

from d1.models.tokenizer import encode_prompt, render_prompt
from d1.runs.cli import one_line
from d1.serve.answers import Choice, completion_choice, envelope, generated, usage
from d1.serve.broadcast import Receiver
from d1.serve.engine import Engine, QueueFull, weights_below
from d1.serve.requests import (
    BeginUpdate,
    Broadcast,
    Chat,
    Completion,
    Generate,
    Pause,
    RowsStopped,
    Server,
    Update,
    UpdateGroup,
    completed,
    streamed,
    wants_logprobs,
)
from d1.show.page import film_page

OPEN = ("/", "/health")  # without the API key
LARGEST_BODY = 8 << 20  # bytes
HERE = Path(__file__).parent
EXAMPLES = (  # of a first message: a question, and what the models in pocket/ read
    "A train leaves at 9:40 and arrives at 13:05. How long does it take?",
    "Solve 0002403020033024",
    "Numbers: [13, 5, 4]\nTarget: 4",
    "Tom has 85 books. He drops 8. He buys 6. How many books?",
    "f('abcde') = 'daacb'\nf('edcba') = 'beecd'",
)
STATUS: dict[type[Exception], int] = {LookupError: 404, QueueFull: 429, ValueError: 400}
STATUS |= {ConnectionError: 503, RowsStopped: 503}


def make_app(server: Server) -> Any:
    """The application, which starts the engine's thread and ends it."""
    # Imported here, because they are optional; so annotations of routes must not be strings in this module.
    from fastapi import FastAPI, Request
    from fastapi.exceptions import RequestValidationError
    from fastapi.responses import HTMLResponse, JSONResponse, Response, StreamingResponse
    from prometheus_client import CONTENT_TYPE_LATEST, CollectorRegistry, Histogram, generate_latest
    from starlette.exceptions import HTTPException

    engine = server.engine

    @asynccontextmanager
    async def lifespan(app: Any) -> AsyncIterator[None]:
        engine.thread.start()
        yield
        await asyncio.to_thread(engine.close)

    app = FastAPI(lifespan=lifespan, docs_url=None, redoc_url=None, openapi_url=None)
    registry = CollectorRegistry()
    registry.register(EngineMetrics(engine))
    seconds = Histogram("d1_request_seconds", "Requests by path and status", ("path", "status"), registry=registry)
    paths = {"/", "/metrics"}

    def refusal(status: int, message: str) -> Any:
        kind = "server_error" if status >= 500 else "invalid_request_error"
        headers = {"Retry-After": "1"} if status == 429 else None
        error = {"message": message, "type": kind, "param": None, "code": status}
        return JSONResponse({"error": error}, status, headers)

    def refused(request: Request, error: Exception) -> Any:
        known = [STATUS[kind] for kind in STATUS if isinstance(error, kind)]
        return refusal(getattr(error, "status", None) or [*known, 500][0], one_line(error))

    for kind in (*STATUS, Exception):
        app.add_exception_handler(kind, refused)

    @app.exception_handler(RequestValidationError)
    def malformed(request: Request, error: RequestValidationError) -> Any:
        parts = [f"{'.'.join(map(str, part['loc'][1:])) or 'body'}: {part['msg']}" for part in error.errors()[:3]]
        return refusal(400, "; ".join(parts))

    @app.exception_handler(HTTPException)
    def unknown(request: Request, error: HTTPException) -> Any:
        return refusal(error.status_code, str(error.detail))

    async def answered(request: Request, work: Awaitable[Any]) -> Any:
        """What `work` gives, unless the client leaves before."""

        async def departure() -> None:
            while (await request.receive())["type"] != "http.disconnect":
                pass

        both = [asyncio.ensure_future(work), asyncio.ensure_future(departure())]
        try:
            await asyncio.wait(both, return_when=asyncio.FIRST_COMPLETED)
            return both[0].result() if both[0].done() else Response(status_code=499)
        finally:
            for task in both:
                task.cancel()

    # --- SGLang's -----------------------------------------------------------------------------------------------------

    @app.get("/health")
    async def health() -> Any:
        return Response(status_code=200 if engine.thread.is_alive() else 503)

    @app.get("/model_info")
    async def model_info() -> Any:
        config = engine.model.config
        block = getattr(config, "block_size", None)
        facts = {"model_path": server.name, "weight_version": engine.version, "model_type": config.model_type}
        facts |= {"architectures": config.architectures, "block_size": block, "mask_token_id": engine.mask_token_id}
        facts |= {"dtype": str(engine.model.dtype).removeprefix("torch.")}
        facts |= {"takes_broadcasts": server.receiver is not None}
        return facts | {"weights_dir": [str(folder.resolve()) for folder in server.weights_dir]}

    @app.post("/generate")
    async def generate(body: Generate, request: Request) -> Any:
        rows = await asyncio.to_thread(server.rows_to_generate, body)

        def answer(done: list[Any]) -> Any:
            given = not body.sampling_params.ignore_eos, body.return_logprob, body.return_step_maps
            answers = [generated(row, one, *given) for row, one in zip(rows, done, strict=True)]
            several = isinstance(body.input_ids[0], list) or len(rows) > 1
            return JSONResponse(answers if several else answers[0])

        async def sample() -> Any:
            return await asyncio.to_thread(answer, await completed(engine, rows))

        return await answered(request, sample())

    async def taken(update: Future[None]) -> None:
        """Waits for an update, which continues when nobody waits for it any more."""
        await asyncio.shield(asyncio.wrap_future(update))

    @app.post("/update_weights_from_disk")
    async def update_weights_from_disk(body: Update) -> Any:
        try:
            folder = await asyncio.to_thread(weights_below, server.weights_dir, body.model_path)
            if body.abort_all_requests:
                engine.stop_all("aborted by an update of the weights")
            assert server.loader is not None
            load = partial(server.loader.load, folder)
            await taken(engine.replace_model(load, body.weight_version or str(folder)))
        except Exception as error:
            known = {QueueFull: 429, ConnectionError: 503}
            return JSONResponse({"success": False, "message": one_line(error)}, known.get(type(error), 400))
        return {"success": True, "message": f"the weights are those of {folder}"}

    async def received(work: Callable[[Receiver], Any]) -> Any:
        """What `work` gives in a thread, because it waits for the sender."""
        if server.receiver is None:
            raise ValueError("this server takes no weights by broadcast: start it with --take_broadcasts")
        return await asyncio.to_thread(work, server.receiver)

    @app.post("/init_weights_update_group")
    async def init_weights_update_group(body: UpdateGroup, request: Request) -> Any:
        if request.client is None or body.master_address != request.client.host:
            raise ValueError(f"master_address {body.master_address} is not the address that this request came from")
        await received(lambda receiver: receiver.join(body.master_address, body.master_port, body.group_name))
        return {"success": True, "message": "connected"}

    @app.post("/begin_weight_update")
    async def begin_weight_update(body: BeginUpdate) -> Any:
        await received(lambda receiver: receiver.begin())
        return {"success": True, "message": "ready for weights"}

    @app.post("/update_weights_from_distributed")
    async def update_weights_from_distributed(body: Broadcast) -> Any:
        given = body.names, body.dtypes, body.shapes, body.group_name, body.weight_version
        await received(lambda receiver: receiver.receive(*given))
        return {"success": True, "message": "in use after /end_weight_update"}

    @app.post("/end_weight_update")
    async def end_weight_update() -> Any:
        folder, version = await received(lambda receiver: receiver.take())
        with folder as path:
            assert server.loader is not None
            await taken(engine.replace_model(partial(server.loader.load, Path(path)), version))
        return {"success": True, "message": f"the weights are those of {version}"}

    @app.post("/pause_generation")
    async def pause_generation(body: Pause) -> Any:
        engine.pause(body.mode)
        return {"status": "ok", "mode": body.mode}

    @app.post("/continue_generation")
    async def continue_generation() -> Any:
        engine.resume()
        return {"status": "ok"}

    @app.api_route("/flush_cache", methods=["GET", "POST"])
    async def flush_cache() -> Any:
        return Response("no keys and values are kept from one request to another\n")

    # --- OpenAI's -----------------------------------------------------------------------------------------------------

    @app.get("/v1/models")
    async def models() -> Any:
        return {"object": "list", "data": [{"id": server.name, "object": "model", "created": 0, "owned_by": "d1"}]}

    @app.post("/v1/completions")
    async def complete(body: Completion, request: Request) -> Any:
        return await openai(body, request, "text_completion", wants_logprobs(body))

    @app.post("/v1/chat/completions")
    async def chat(body: Chat, request: Request) -> Any:
        return await openai(body, request, "chat.completion", wants_logprobs(body))

    async def openai(body: Any, request: Request, name: str, logprobs: bool) -> Any:
        rows, chats = await asyncio.to_thread(server.rows_of_openai, body), name.startswith("chat")
        choices = [Choice(server.tokenizer, row.ends, body.stops) for row in rows]
        if body.stream:
            if logprobs:
                raise ValueError("logprobs are not streamed: leave out stream or logprobs")
            parts = streamed(server, rows, choices, name, bool((body.stream_options or {}).get("include_usage")))
            first = await anext(parts)  # a full queue is an answer of its own

            async def everything() -> AsyncIterator[str]:
                yield first
                async for part in parts:
                    yield part

            headers = {"Cache-Control": "no-store"}
            return StreamingResponse(everything(), media_type="text/event-stream", headers=headers)

        def answer(done: list[Any]) -> Any:
            parts = [completion_choice(i, c, done[i] if logprobs else None, chats) for i, c in enumerate(choices)]
            return JSONResponse(envelope(name, server.name, rows, parts, usage=usage(rows, choices)))

        async def sample() -> Any:
            return await asyncio.to_thread(answer, await completed(engine, rows, choices))

        return await answered(request, sample())

    # --- For people and for Prometheus --------------------------------------------------------------------------------

    form = (HERE / "chat.html").read_text().replace("EXAMPLE", html.escape(example(server.tokenizer)))
    page = film_page(server.name, [], form, (HERE / "chat.js").read_text())

    @app.get("/")
    async def chat_page() -> Any:
        return HTMLResponse(page)

    @app.get("/metrics")
    async def metrics() -> Any:
        return Response(generate_latest(registry), media_type=CONTENT_TYPE_LATEST)

    paths |= {route.path for route in app.routes if hasattr(route, "path")}

    def refuse(scope: Any) -> Any:
        headers = dict(scope["headers"])
        host = headers.get(b"host", b"").decode("latin-1")
        if not server.api_key and not server.is_called(host):  # a page of another site, say
            return refusal(400, f"the header Host: {host[:200]} does not name this server: --allowed_hosts adds names")
        given, wanted = headers.get(b"authorization", b""), f"Bearer {server.api_key}".encode()
        if server.api_key and scope["path"] not in OPEN and not hmac.compare_digest(given, wanted):
            return refusal(401, "this server asks for its API key, as Authorization: Bearer KEY")
        if b"transfer-encoding" in headers:
            return refusal(411, "a body needs a Content-Length")
        if int(headers.get(b"content-length", b"0")) > LARGEST_BODY:
            return refusal(413, f"a body has at most {LARGEST_BODY} bytes")
        kind = headers.get(b"content-type", b"").partition(b";")[0].strip().lower()
        if scope["method"] == "POST" and kind != b"application/json":  # which no page of another site may send
            return refusal(415, "a POST needs the header Content-Type: application/json, also without a body")
        return None

    async def gate(scope: Any, receive: Any, send: Any) -> None:
        """Checks the headers of a request before it is read, and measures its time."""
        if scope["type"] != "http":
            return await app(scope, receive, send)
        began, path = time.perf_counter(), scope["path"] if scope["path"] in paths else "other"

        async def sending(message: Any) -> None:
            if message["type"] == "http.response.start":
                sending.status = message["status"]  # type: ignore[attr-defined]
            await send(message)

        try:
            await (refuse(scope) or app)(scope, receive, sending)
        finally:
            status = getattr(sending, "status", 500)
            seconds.labels(path, status).observe(time.perf_counter() - began)

    return gate


def example(tokenizer: Any) -> str:
    """The first of the examples that a model can read; empty if it reads none."""
    for text in EXAMPLES:
        with suppress(ValueError):
            if encode_prompt(tokenizer, render_prompt(tokenizer, [{"role": "user", "content": text}])):
                return text
    return ""


class EngineMetrics:
    """The engine's numbers for Prometheus, read when they are asked for."""

    def __init__(self, engine: Engine) -> None:
        self.engine = engine

    def collect(self) -> Any:
        from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, InfoMetricFamily

        engine = self.engine
        yield GaugeMetricFamily("d1_rows_waiting", "Rows in the queue", len(engine.waiting))
        yield GaugeMetricFamily("d1_rows_at_work", "Rows in a batch", len(engine.rows))
        yield GaugeMetricFamily("d1_batch_size", "The most rows at work", engine.batch_size)
        yield CounterMetricFamily("d1_forward_passes", "Forward passes of a batch", engine.passes)
        yield CounterMetricFamily("d1_row_passes", "Rows of all forward passes together", engine.row_passes)
        yield CounterMetricFamily("d1_forward_tokens", "Tokens processed, of rows that ended", engine.forward_tokens)
        yield CounterMetricFamily("d1_tokens", "Tokens of finished canvases", engine.tokens)
        yield InfoMetricFamily("d1_weights", "The weights in use", {"version": engine.version})
