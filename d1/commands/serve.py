"""d1 serve MODEL: this library's samplers over HTTP, in SGLang's and OpenAI's dialects."""

from __future__ import annotations

import asyncio
import gc
import logging
import os
import signal
import socket
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from errno import EADDRINUSE
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

from d1.commands.model import CompletionFlags, model_argument, model_of, resolve_canvas
from d1.ranges import COUNT, Range, setting
from d1.sampling.settings import GEN_LENGTH_HELP, ModelFlags, refuse_scdd, sampling_flag, sampling_settings
from d1.serve import KEY, LOCAL

if TYPE_CHECKING:
    from d1.models.folder import ModelFolder
    from d1.serve.requests import Server

logger = logging.getLogger(__name__)

# Seconds after the last row in which a server that ends waits for its clients, and after a second signal
CLIENT_SECONDS = 10.0
FORCED_SECONDS = 1.0
MISSING = "d1 serve needs FastAPI and uvicorn: pip install -e '.[serve]' in the checkout"


@dataclass(frozen=True, kw_only=True)
class ServerFlags(ModelFlags):
    host: str = setting("127.0.0.1", "address to listen on (default: %(default)s)", group="server")
    port: Annotated[int, Range(0, 65535, integer=True)] = setting(30000, "0: any that is free (default: %(default)s)")
    allowed_hosts: list[str] = setting(
        [],
        "names by which clients call this server, besides localhost and HOST ('*': all; with an API key: all)",
        nargs="+",
        metavar="NAME",
    )
    api_key: str | None = setting(None, f"key that clients must send (default: ${KEY})")
    served_model_name: str | None = setting(None, "the model's name in OpenAI's dialect (default: MODEL)")
    weights_dir: list[Path] = setting(
        [],
        "folder below which requests may name weights to load; give the flag once per folder",
        type=Path,
        action="append",
    )
    batch_size: Annotated[int, COUNT] = setting(32, "rows per forward pass (default: %(default)s)")
    queue_size: Annotated[int, COUNT] = setting(1024, "rows that may wait (default: %(default)s)")
    max_gen_length: Annotated[int | None, COUNT] = setting(
        None, "largest canvas of a request (default: the model's room)"
    )


@dataclass(frozen=True, kw_only=True)
class ServeFlags(CompletionFlags, ServerFlags):
    model_path: str = model_argument()
    gen_length: int | None = sampling_flag(
        "gen_length", help=GEN_LENGTH_HELP, group="sampling, where a request does not say"
    )


def bind_socket(host: str, port: int) -> socket.socket:
    """A socket of this address, which does not listen yet."""
    listener = socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET)
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    with named_address(host, port):
        listener.bind((host, port))
    return listener


@contextmanager
def named_address(host: str, port: int) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        advice = ": choose another --port, or --port 0 for any that is free" if error.errno == EADDRINUSE else ""
        raise OSError(f"--host {host} --port {port}: {error.strerror}{advice}") from error


def hosts(host: str, extra_names: Sequence[str]) -> tuple[str, ...]:
    """The names in the header `Host` of requests to a server that listens on `host`; if that is all addresses, also the
    machine's own."""
    names = [host.lower()]
    if host in ("", "0.0.0.0", "::"):
        machine = socket.gethostname().lower()
        names = [machine, machine.partition(".")[0]]
    return (*LOCAL, *names, *(name.lower().strip("[]") for name in extra_names))


def served_model(args: ServeFlags, folder: ModelFolder) -> Any:
    """The model, with its adapter merged into it as in RL: an adapter that is sent later comes on top."""
    from peft import PeftModel

    from d1.models.adapters import merge_adapter

    model = model_of(args, folder)
    if isinstance(model, PeftModel):
        return merge_adapter(model, args.checkpoint_path or args.model_path).eval()
    return model


def server_of(args: ServeFlags, folder: ModelFolder, tokenizer: Any) -> Server:
    """The model, its engine and the limits of requests, as the flags say."""
    from d1.serve.engine import Engine, Loader
    from d1.serve.requests import Server

    model = served_model(args, folder)
    engine = Engine(
        model,
        tokenizer.mask_token_id,
        batch_size=args.batch_size,
        queue_size=args.queue_size,
        version="default",
    )
    defaults = sampling_settings(args, model.config)
    refuse_scdd(defaults, "a server")
    return Server(
        engine,
        tokenizer,
        args.served_model_name or args.model_path,
        defaults,
        args.seed,
        max_gen_length=args.max_gen_length,
        weights_dir=tuple(args.weights_dir),
        api_key=args.api_key,
        allowed_hosts=hosts(args.host, args.allowed_hosts),
        loader=Loader(partial(served_model, args, folder)),
    )


def make_program(server: Server) -> Any:
    """The process's main loop, which ends as signals tell it.

    After the first signal, the requests that were taken are finished, also those of a paused engine. After a second
    one, rows stop after the current pass, and their requests get 503.
    """
    import uvicorn

    from d1.serve.app import make_app

    engine = server.engine

    class Program(uvicorn.Server):
        is_forced = False  # by a second signal

        def handle_exit(self, sig: int, frame: Any) -> None:
            if self.should_exit:
                self.is_forced = True
                engine.stop()
            else:
                engine.drain()
                super().handle_exit(sig, frame)

        async def shutdown(self, sockets: Any = None) -> None:
            disconnection = asyncio.create_task(self.disconnect_clients())
            await super().shutdown(sockets)
            disconnection.cancel()
            if self.is_forced:
                logger.warning("A second signal ended the server: requests at work got 503.")

        async def disconnect_clients(self) -> None:
            """Disconnects the clients that are left some seconds after the last row: they do not read their answers,
            or the rest of their requests does not come."""
            seconds = 0.0  # since the last row
            while seconds < (FORCED_SECONDS if self.is_forced else CLIENT_SECONDS):
                await asyncio.sleep(0.1)
                seconds = 0.0 if engine.is_busy else seconds + 0.1
            connections = [*self.server_state.connections]
            if connections and not self.is_forced:
                logger.warning("%d clients did not read or send in time, and are disconnected.", len(connections))
            for connection in connections:
                connection.transport.abort()

    return Program(uvicorn.Config(make_app(server), log_level="warning"))


def run(args: ServeFlags) -> None:
    try:
        import fastapi  # noqa: F401
        import uvicorn  # noqa: F401
    except ImportError as error:
        raise ImportError(MISSING) from error

    from d1.models.tokenizer import check_chat_template

    if args.api_key is None:
        args = replace(args, api_key=os.environ.get(KEY))
    if missing := [folder for folder in args.weights_dir if not folder.is_dir()]:
        raise FileNotFoundError(f"--weights_dir {missing[0]}: there is no such folder")
    listener = bind_socket(args.host, args.port)  # before the model is loaded
    tokenizer = args.load_tokenizer()
    check_chat_template(tokenizer, args.model_path)
    folder = args.read_folder()
    args = resolve_canvas(args, folder, masks_for="the server")
    gen_length = sampling_settings(args, folder.config).gen_length
    if args.max_gen_length is not None and gen_length > args.max_gen_length:
        raise ValueError(
            f"--max_gen_length {args.max_gen_length}: a request that names no length has a canvas of {gen_length} "
            "tokens; give a lower --gen_length"
        )

    # Else the garbage collector looks through the libraries whenever a large request makes many objects. The model is
    # not frozen: it lies in a reference cycle, and its memory is needed after an update of the weights.
    gc.collect()
    gc.freeze()
    server = server_of(args, folder, tokenizer)

    program = make_program(server)
    with named_address(args.host, args.port):
        listener.listen()  # from here on clients are heard
    signal.signal(signal.SIGTERM, signal.SIG_IGN)  # uvicorn's own, which drains, comes and goes before it
    host = f"[{args.host}]" if ":" in args.host else args.host
    sys.stderr.write(f"Serving {server.name} on http://{host}:{listener.getsockname()[1]}\n")
    if args.host not in LOCAL and not args.api_key:
        logger.warning("No --api_key: whoever reaches %s may use this server.", args.host)
    sys.stderr.flush()
    program.run(sockets=[listener])
