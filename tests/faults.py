"""What can go wrong around a run, made on purpose: for tests of any room."""

from __future__ import annotations

import json
import os
import random
import resource
import shutil
import tempfile
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import requests
import torch
from peft import PeftModel
from safetensors import safe_open
from safetensors.torch import save_file
from transformers import PreTrainedModel

# --- The clock --------------------------------------------------------------------------------------------------------


def clock_steps_back(folder: Path, seconds: float = 3600.0) -> None:
    """The clock steps back: what is below `folder` was changed later than anything that is written from now on."""
    for path in (folder, *folder.rglob("*")):
        times = path.stat()
        os.utime(path, (times.st_atime + seconds, times.st_mtime + seconds))


def write_at_the_same_time(file: Path, content: bytes) -> None:
    """The content changes, but not the time of the last change: a copy with its times, or a clock that stepped back."""
    times = file.stat()
    file.write_bytes(content)
    os.utime(file, ns=(times.st_atime_ns, times.st_mtime_ns))


# --- Files ------------------------------------------------------------------------------------------------------------


def flip_bit(file: Path, share: float = 0.75) -> None:
    """One bit of a file differs, of the byte at this share of its length; its size and times stay."""
    content = bytearray(file.read_bytes())
    content[int(len(content) * share)] ^= 1
    write_at_the_same_time(file, bytes(content))


@contextmanager
def full_disk(room: int) -> Iterator[None]:
    """Inside, no file of this process can grow beyond `room` bytes: the system answers as for a full disk, EFBIG."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (room, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


def edit_json(path: Path, **fields: Any) -> None:
    """Change fields of a JSON file such as a model's `config.json`."""
    path.write_text(json.dumps(json.loads(path.read_text()) | fields))


# --- Models -----------------------------------------------------------------------------------------------------------


def with_nan(source: Path, folder: Path, weight: str, at: tuple[int, ...] = (), value: float = float("nan")) -> Path:
    """A copy of a model's folder whose `weight` is `value` at the index `at`; (): everywhere."""
    shutil.copytree(source, folder)
    for path in folder.glob("*.safetensors"):
        with safe_open(path, framework="pt") as file:
            weights, metadata = {name: file.get_tensor(name) for name in file.keys()}, file.metadata()  # noqa: SIM118
        if weight in weights:
            weights[weight][at if at else ...] = value
            save_file(weights, path, metadata=metadata)
            return folder
    raise KeyError(f"{source} has no weight {weight}")


# --- Servers ----------------------------------------------------------------------------------------------------------


@contextmanager
def no_room(kept: torch.nn.Module, times: int) -> Iterator[None]:
    """The next `times` moves of other models than `kept` find no room on their device."""
    plain, left = torch.nn.Module.to, [times]

    def to(self: torch.nn.Module, *where: Any, **options: Any) -> torch.nn.Module:
        if isinstance(self, PreTrainedModel | PeftModel) and self is not kept and left[0]:
            left[0] -= 1
            raise torch.OutOfMemoryError("no room, made on purpose")
        return plain(self, *where, **options)

    torch.nn.Module.to = to  # type: ignore[assignment]
    try:
        yield
    finally:
        torch.nn.Module.to = plain  # type: ignore[method-assign]


@contextmanager
def failing_passes(engine: Any, fails: Any) -> Iterator[None]:
    """Forward passes of an engine's model in whose batch some row's ids (rows, length) `fails` raise an error."""
    backbone = engine.model.base_model

    def check(module: Any, given: tuple[Any, ...], options: dict[str, Any]) -> None:
        ids = options.get("input_ids", given[0] if given else None)
        if fails(ids):
            raise FloatingPointError("a pass that failed on purpose")

    hook = backbone.register_forward_pre_hook(check, with_kwargs=True)
    try:
        yield
    finally:
        hook.remove()


Rows = list[dict[str, Any]]


def no_lie(rows: Rows) -> Any:
    return rows


class Liar(ThreadingHTTPServer):
    """A proxy of a server: `lie` changes the rows that `/generate` answers; everything else passes through."""

    def __init__(self, target: str) -> None:
        super().__init__(("127.0.0.1", 0), Handler)
        self.target, self.lie, self.url = target, no_lie, f"http://127.0.0.1:{self.server_address[1]}"


class Handler(BaseHTTPRequestHandler):
    server: Liar

    def answer(self) -> None:
        body = self.rfile.read(int(self.headers.get("content-length", 0)))
        kept = {name: self.headers[name] for name in ("content-type", "authorization") if name in self.headers}
        told = requests.request(self.command, self.server.target + self.path, data=body, headers=kept, timeout=300)
        content = told.content
        if self.path == "/generate" and told.status_code == 200:
            lied = self.server.lie(told.json())
            content = lied if isinstance(lied, bytes) else json.dumps(lied).encode()
        self.send_response(told.status_code)
        self.send_header("content-type", told.headers["content-type"])
        self.send_header("content-length", str(len(content)))
        self.end_headers()
        self.wfile.write(content)

    do_GET = do_POST = answer

    def log_message(self, *args: Any) -> None:
        pass


@contextmanager
def lying_server(url: str) -> Iterator[Liar]:
    """A proxy of the server at `url`, which tells the truth until its `lie` is set."""
    with Liar(url) as liar:
        thread = threading.Thread(target=liar.serve_forever, daemon=True)
        thread.start()
        try:
            yield liar
        finally:
            liar.shutdown()
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


NO_PROCESS = "echo 'bwrap: Creating new namespace failed: Resource temporarily unavailable' >&2; exit 1"


@contextmanager
def failing_sandbox(times: int | None, failure: str = NO_PROCESS) -> Iterator[None]:
    """The next `times` starts of bubblewrap fail, or all of them if it is None; later ones work.

    Args:
        failure: what a start does instead, in the language of sh.
    """
    before = os.environ["PATH"]
    with tempfile.TemporaryDirectory() as name:  # the sandbox's user can read all its parents
        folder, fails = Path(name), Path(name) / "fails"
        fails.mkdir()
        for path in (folder, fails):
            path.chmod(0o777)
        for number in range(times or 0):
            (fails / str(number)).touch()
        once = f"for file in {fails}/*; do rm $file 2>/dev/null && {{ {failure}; }}; done"  # rm: one start per file
        line = failure if times is None else once
        (folder / "bwrap").write_text(f'#!/bin/sh\n{line}\nexec {shutil.which("bwrap")} "$@"\n')
        (folder / "bwrap").chmod(0o755)
        os.environ["PATH"] = f"{folder}:{before}"
        try:
            yield
        finally:
            os.environ["PATH"] = before
