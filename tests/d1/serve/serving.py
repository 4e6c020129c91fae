"""A server in this process, behind a real port, and what its rows must be: `rollout` of each row alone."""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import requests
import torch
import uvicorn

from d1.masking import keyed_generator
from d1.models import load_model, load_tokenizer
from d1.sampling import Rollout, SamplingSettings, rollout
from d1.serve.app import make_app
from d1.serve.engine import Engine
from d1.serve.requests import Server
from d1.serve.rows import key_of
from d1.serve.weights import Loader


class Served:
    """A running server: its engine, its tokenizer, and its address."""

    def __init__(self, server: Server, url: str) -> None:
        self.server, self.engine, self.tokenizer, self.url = server, server.engine, server.tokenizer, url

    def post(self, path: str, status: int = 200, **body: Any) -> Any:
        answer = requests.post(f"{self.url}{path}", json=body, timeout=60)
        assert answer.status_code == status, answer.text
        return answer.json()

    def metric(self, name: str) -> float:
        lines = requests.get(f"{self.url}/metrics", timeout=60).text.splitlines()
        return next(float(line.split()[-1]) for line in lines if line.startswith(name))

    def wait_for(self, name: str, value: float) -> None:
        until = time.monotonic() + 30
        while self.metric(name) != value:
            assert time.monotonic() < until, f"{name} is {self.metric(name)}, not {value}"
            time.sleep(0.02)

    @contextlib.contextmanager
    def paused(self, mode: str = "in_place") -> Iterator[None]:
        self.post("/pause_generation", mode=mode)
        try:
            yield
        finally:
            self.post("/continue_generation")


@contextlib.contextmanager
def serving(
    folder: str | Path, *, batch_size: int = 8, queue_size: int = 256, weights_dir: Any = None, **options: Any
) -> Iterator[Served]:
    model, tokenizer = load_model(folder), load_tokenizer(folder)
    block = getattr(model.config, "block_size", None) or 8
    engine = Engine(model, tokenizer.mask_token_id, batch_size=batch_size, queue_size=queue_size, version="default")
    defaults = SamplingSettings(16, block, 8)
    options |= {
        "weights_dir": () if weights_dir is None else (weights_dir,),
        "loader": Loader(lambda: load_model(folder)),
    }
    server = Server(engine, tokenizer, "tiny", defaults, **options)
    config = uvicorn.Config(make_app(server), "127.0.0.1", 0, log_level="warning")
    socket, program = config.bind_socket(), uvicorn.Server(config)
    socket.listen()
    thread = threading.Thread(target=program.run, kwargs={"sockets": [socket]})
    thread.start()
    served = Served(server, f"http://127.0.0.1:{socket.getsockname()[1]}")
    try:
        while requests.get(f"{served.url}/health", timeout=60).status_code != 200:
            time.sleep(0.02)
        yield served
    finally:
        program.should_exit = True
        engine.resume()
        thread.join()


def alone(
    model: Any,
    mask_token_id: int,
    ids: list[int],
    rid: str,
    settings: SamplingSettings,
    ends: Any = None,
    seed: int = 0,
) -> Rollout:
    """What `rollout` gives for a row in a batch of its own."""
    return rollout(
        model,
        torch.tensor([ids]),
        torch.ones(1, len(ids), dtype=torch.long),
        settings,
        mask_token_id=mask_token_id,
        generator=[keyed_generator(seed, *key_of(rid))],
        eos_token_ids=ends,
    )
