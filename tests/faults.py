"""What can go wrong around a run, made on purpose: for tests of any room."""

from __future__ import annotations

import contextlib
import json
import random
import threading
from collections.abc import Callable, Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import requests

# --- The clock --------------------------------------------------------------------------------------------------------

# --- Files ------------------------------------------------------------------------------------------------------------

# --- Models -----------------------------------------------------------------------------------------------------------

# --- Servers ----------------------------------------------------------------------------------------------------------

Rows = list[dict[str, Any]]


def no_lie(rows: Rows) -> Any:
    return rows


class Liar:
    """A proxy of a server: `lie` changes the rows that `/generate` answers; everything else passes through."""

    def __init__(self, url: str) -> None:
        self.target, self.lie = url, no_lie
        liar = self

        class Handler(BaseHTTPRequestHandler):
            def do_GET(self) -> None:
                liar.answer(self, "GET", b"")

            def do_POST(self) -> None:
                liar.answer(self, "POST", self.rfile.read(int(self.headers.get("content-length", 0))))

            def log_message(self, *args: Any) -> None:
                pass

        self.program = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.url = f"http://127.0.0.1:{self.program.server_address[1]}"

    def answer(self, handler: BaseHTTPRequestHandler, method: str, body: bytes) -> None:
        kept = {name: handler.headers[name] for name in ("content-type", "authorization") if name in handler.headers}
        told = requests.request(method, self.target + handler.path, data=body, headers=kept, timeout=300)
        content = told.content
        if handler.path == "/generate" and told.status_code == 200:
            lied = self.lie(told.json())
            content = lied if isinstance(lied, bytes) else json.dumps(lied).encode()
        handler.send_response(told.status_code)
        handler.send_header("content-type", told.headers["content-type"])
        handler.send_header("content-length", str(len(content)))
        handler.end_headers()
        handler.wfile.write(content)


@contextlib.contextmanager
def lying_server(url: str) -> Iterator[Liar]:
    """A proxy of the server at `url`, which tells the truth until its `lie` is set."""
    liar = Liar(url)
    thread = threading.Thread(target=liar.program.serve_forever, daemon=True)
    thread.start()
    try:
        yield liar
    finally:
        liar.program.shutdown()
        liar.program.server_close()
        thread.join()


PER_TOKEN = ("output_token_logprobs", "output_token_entropies", "step_maps")  # of `meta_info`


def resized(rows: Rows, change: Callable[[list[Any]], list[Any]]) -> Rows:
    """Row 1 with another number of tokens, everywhere."""
    rows[1]["output_ids"] = change(rows[1]["output_ids"])
    rows[1]["meta_info"] |= {name: change(rows[1]["meta_info"][name]) for name in PER_TOKEN}
    return rows


def with_token(rows: Rows, place: int, token: int) -> Rows:
    """Row 1 with another token."""
    rows[1]["output_ids"][place] = rows[1]["meta_info"]["output_token_logprobs"][place][1] = token
    return rows


def with_meta(rows: Rows, name: str, place: int, value: Any) -> Rows:
    """Row 1 with another value of a token in `meta_info`."""
    rows[1]["meta_info"][name][place] = value
    return rows


def with_logp(rows: Rows, place: int, value: float) -> Rows:
    """Row 1 with another log-probability."""
    rows[1]["meta_info"]["output_token_logprobs"][place][0] = value
    return rows


def everywhere(rows: Rows, change: Callable[[dict[str, Any]], Any]) -> Rows:
    for row in rows:
        change(row)
    return rows


def with_random_tokens(row: dict[str, Any]) -> None:
    draw = random.Random(row["meta_info"]["id"])
    row["output_ids"] = [draw.randrange(8, 40) for _ in row["output_ids"]]
    for entry, token in zip(row["meta_info"]["output_token_logprobs"], row["output_ids"], strict=True):
        entry[1] = token


def with_higher_logps(row: dict[str, Any]) -> None:
    for entry in row["meta_info"]["output_token_logprobs"]:
        entry[0] *= 0.9


def with_lower_entropies(row: dict[str, Any]) -> None:
    row["meta_info"]["output_token_entropies"] = [0.9 * value for value in row["meta_info"]["output_token_entropies"]]


def with_short_blocks(row: dict[str, Any]) -> None:
    row["meta_info"]["step_maps"] = [1] * len(row["output_ids"])


# --- The sandbox ------------------------------------------------------------------------------------------------------
