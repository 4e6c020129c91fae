"""Real processes for the tests of RL on servers: `d1 serve`, and trainers that share their work.

They are forks of a process that has imported everything, because imports take seconds.
"""

from __future__ import annotations

import contextlib
import json
import multiprocessing
import os
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import requests
import torch
import uvicorn  # noqa: F401
from safetensors.torch import save_file

import d1.serve.app  # noqa: F401
from d1.__main__ import main, make_parser
from d1.runs.cli import exit_process
from d1.serve import KEY
from tests.forks import free_port
from tests.tiny_grpo import logged, make_method, weights

PROCESSES = multiprocessing.get_context("forkserver")
PROCESSES.set_forkserver_preload([__name__])
SECRET = "secret"
LIMIT = 300.0  # seconds that a test waits for a process, however busy the machine is


def serve(model: Path, port: int, flags: list[str]) -> None:
    torch.set_num_threads(1)
    os.environ[KEY] = SECRET
    main(make_parser().parse_args(["serve", str(model), "--port", str(port), "--batch_size", "8", *flags]))


class Fleet:
    """Servers of a model, which load weights from below `folder`; `words`: more flags of theirs."""

    def __init__(self, model: Path, folder: Path, count: int = 2, words: Sequence[str] = ()) -> None:
        self.model, self.words = model, ["--weights_dir", str(folder), *words]
        self.ports = [free_port() for _ in range(count)]
        self.processes: list[Any] = [None] * count
        for number in range(count):
            self.start(number)
        for number in range(count):
            self.wait(number)

    @property
    def flags(self) -> dict[str, Any]:
        urls = [self.url(number) for number in range(len(self.ports))]
        return {"rollout_mode": "server", "rollout_server_base_url": urls, "rollout_server_timeout": LIMIT}

    def url(self, number: int) -> str:
        return f"http://127.0.0.1:{self.ports[number]}"

    def start(self, number: int) -> None:
        arguments = self.model, self.ports[number], self.words
        self.processes[number] = PROCESSES.Process(target=serve, args=arguments, daemon=True)
        self.processes[number].start()

    def wait(self, number: int) -> None:
        until = time.monotonic() + LIMIT
        while True:
            with contextlib.suppress(requests.ConnectionError):
                if requests.get(f"{self.url(number)}/health", timeout=LIMIT).status_code == 200:
                    return
            assert time.monotonic() < until, f"server {number} does not start"
            time.sleep(0.05)

    def kill(self, number: int) -> None:
        self.processes[number].kill()
        self.processes[number].join()

    def ask(self, number: int, path: str, **body: Any) -> requests.Response:
        method = "POST" if path.endswith("_generation") else "GET"
        headers = {"Authorization": f"Bearer {SECRET}"}
        return requests.request(method, self.url(number) + path, json=body, headers=headers, timeout=LIMIT)

    def metric(self, number: int, name: str) -> float:
        lines = self.ask(number, "/metrics").text.splitlines()
        return next(float(line.split()[-1]) for line in lines if line.startswith(name))

    def pause(self, number: int) -> None:
        assert self.ask(number, "/pause_generation", mode="in_place").status_code == 200

    def resume(self, number: int) -> None:
        assert self.ask(number, "/continue_generation").status_code == 200

    def until(self, number: int, name: str, least: float) -> None:
        until = time.monotonic() + LIMIT
        while self.metric(number, name) < least:
            assert time.monotonic() < until, f"{name} of server {number} stays below {least}"
            time.sleep(0.02)

    def close(self) -> None:
        for process in self.processes:
            process.kill()
            process.join()


def train(rank: int, port: int, model: Path, folder: Path, options: dict[str, Any]) -> None:
    """One of two processes that train together."""
    torch.set_num_threads(1)
    os.environ |= {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "2"}
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "ACCELERATE_USE_CPU": "true", KEY: SECRET}
    resume = options.pop("resume", None)
    trainer = make_method(model, folder, "d1", ddp_backend="gloo", **options)
    trainer.train(resume_from_checkpoint=resume)
    if rank == 0:
        save_file(weights(trainer.model), folder / "end.safetensors")
        (folder / "logged.json").write_text(json.dumps([trainer.accelerator.num_processes, logged(trainer)]))
    trainer.accelerator.wait_for_everyone()
    exit_process()


def trainers(model: Path, folder: Path, **options: Any) -> list[Any]:
    """Two processes that train together."""
    port = free_port()
    both = [PROCESSES.Process(target=train, args=(rank, port, model, folder, options), daemon=True) for rank in (0, 1)]
    for process in both:
        process.start()
    return both
