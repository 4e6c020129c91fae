"""`d1 serve` as users start it: it says where it listens, answers curl, and drains when it is told to end."""

from __future__ import annotations

import json
import os
import re
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from multiprocessing.process import BaseProcess
from pathlib import Path
from signal import SIGINT, SIGTERM
from typing import Any
from weakref import WeakSet

import pytest
import requests

from d1.__main__ import main, make_parser
from d1.commands import serve
from d1.serve.engine import Loader
from tests import forks

PROMPT = {"input_ids": [5, 6], "sampling_params": {"max_new_tokens": 200, "ignore_eos": True, "block_length": 200}}


@contextmanager
def started(
    model: Path, folder: Path, *flags: str, work: Callable[..., None] = forks.module
) -> Iterator[tuple[BaseProcess, str]]:
    """A process of `d1 serve`, which `work` runs, and its address once it listens."""
    words, log = ["serve", str(model), "--port", "0", "--batch_size", "4", *flags], folder / "log"
    (process,) = forks.start(work, "d1", *words, log=log, folder=folder)
    try:
        while not (found := re.search(r"^Serving .* on (http://127.0.0.1:\d+)\n", log.read_text(), re.MULTILINE)):
            assert process.is_alive()
            time.sleep(0.05)
        yield process, found[1]
    finally:
        forks.kill([process])


def test_a_signal_ends_it_after_the_last_answer(tiny_model_dir, tmp_path):
    with started(tiny_model_dir, tmp_path) as (process, url):
        requests.post(f"{url}/pause_generation", json={"mode": "in_place"}, timeout=60)
        curl = ["curl", "-s", f"{url}/generate", "-H", "Content-Type: application/json", "-d", json.dumps(PROMPT)]
        asked = [subprocess.Popen(curl, stdout=subprocess.PIPE) for _ in range(6)]  # 4 at work, 2 that wait
        while "d1_rows_waiting 6\n" not in requests.get(f"{url}/metrics", timeout=60).text:
            assert process.is_alive()
        requests.post(f"{url}/continue_generation", timeout=60)
        process.terminate()
        answers = [json.loads(one.communicate()[0]) for one in asked]
        assert [len(answer["output_ids"]) for answer in answers] == [200] * 6
        assert forks.finish([process], tmp_path / "log", timeout=60).endswith(f"{url}\n")
        with pytest.raises(requests.ConnectionError):
            requests.get(f"{url}/health", timeout=60)


def begin_request(url: str, path: str, size: int) -> socket.socket:
    """A connection that sent the head of a POST with a body of `size` bytes."""
    host, _, port = url.removeprefix("http://").partition(":")
    connection = socket.create_connection((host, int(port)))
    head = f"POST {path} HTTP/1.1\r\nHost: {host}\r\nContent-Type: application/json\r\nContent-Length: {size}\r\n\r\n"
    connection.sendall(head.encode())
    return connection


def test_a_signal_ends_a_paused_server_after_the_last_answer(tiny_model_dir, tmp_path):
    """It is not paused again, by a request that began before the signal."""
    pause = json.dumps({"mode": "in_place"}).encode()
    with started(tiny_model_dir, tmp_path) as (process, url):
        requests.post(f"{url}/pause_generation", pause, headers={"Content-Type": "application/json"}, timeout=60)
        second_pause = begin_request(url, "/pause_generation", len(pause))
        curl = ["curl", "-s", f"{url}/generate", "-H", "Content-Type: application/json", "-d", json.dumps(PROMPT)]
        asked = subprocess.Popen(curl, stdout=subprocess.PIPE)
        while "d1_rows_waiting 1\n" not in requests.get(f"{url}/metrics", timeout=60).text:
            assert process.is_alive()
        process.terminate()
        second_pause.sendall(pause)
        assert b" 503 " in second_pause.recv(1000)
        assert len(json.loads(asked.communicate(timeout=60)[0])["output_ids"]) == 200
        forks.finish([process], tmp_path / "log", timeout=60)


LONG = {"input_ids": [5], "sampling_params": {"max_new_tokens": 400, "block_length": 1, "n": 1000, "ignore_eos": True}}


def wait_briefly(*words: str) -> None:
    """`forks.module` of a server that waits for its clients for one second."""
    serve.CLIENT_SECONDS = 1.0
    forks.module(*words)


def test_a_signal_ends_it_although_clients_neither_read_nor_send(tiny_model_dir, tmp_path):
    stream = {"prompt": [5], "max_tokens": 400, "block_length": 400, "steps": 4, "n": 200, "ignore_eos": True}
    sent = json.dumps(stream | {"stream": True, "stream_steps": True}).encode()
    with started(tiny_model_dir, tmp_path, work=wait_briefly) as (process, url):
        reader, sender = begin_request(url, "/v1/completions", len(sent)), begin_request(url, "/generate", 100)
        reader.sendall(sent)
        while "d1_rows_at_work 0\n" in requests.get(f"{url}/metrics", timeout=60).text:
            assert process.is_alive()
        process.terminate()
        text = forks.finish([process], tmp_path / "log", timeout=60)
        assert text.endswith(f"{url}\n2 clients did not read or send in time, and are disconnected.\n")
        reader.close(), sender.close()


@pytest.mark.parametrize(("number", "status", "last"), [(SIGTERM, 0, ""), (SIGINT, 130, "d1: stopped\n")])
def test_a_second_signal_ends_it_after_the_current_pass(tiny_model_dir, tmp_path, number, status, last):
    with started(tiny_model_dir, tmp_path) as (process, url), ThreadPoolExecutor(1) as pool:
        sender = begin_request(url, "/generate", 100)  # whose body never comes
        answer = pool.submit(requests.post, f"{url}/generate", json=LONG, timeout=60)
        while "d1_rows_at_work 0\n" in requests.get(f"{url}/metrics", timeout=60).text:
            assert process.is_alive()
        os.kill(process.pid, number)
        time.sleep(0.3)
        os.kill(process.pid, number)
        assert answer.result().status_code == 503
        text = forks.finish([process], tmp_path / "log", status=status, timeout=60)
        assert text.endswith(f"{url}\nA second signal ended the server: requests at work got 503.\n{last}")
        sender.close()


def test_it_listens_locally_and_a_busy_port_is_named_before_the_model_is_loaded(tmp_path):
    assert make_parser().parse_args(["serve", "m"]).host == "127.0.0.1"
    nothing = str(tmp_path / "no model")
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        with pytest.raises(OSError, match=f"--host 127.0.0.1 --port {port}: Address already in use: choose another"):
            main(make_parser().parse_args(["serve", nothing, "--port", str(port)]))
    with pytest.raises(OSError, match=r"--host 203\.0\.113\.1 --port 30000: Cannot assign"):
        main(make_parser().parse_args(["serve", nothing, "--host", "203.0.113.1", "--api_key", "x"]))


def count_models(*words: str) -> None:
    """`forks.module`; before each update of the weights, it writes how many of the models that were served are left."""
    load = Loader.load
    models: WeakSet[Any] = WeakSet()

    def counting(self: Loader, folder: Path, model: Any) -> Any:
        models.add(model)
        sys.stderr.write(f"{len(models)} in memory\n")
        return load(self, folder, model)

    Loader.load = counting  # type: ignore[method-assign]
    forks.module(*words)


def test_the_first_model_is_freed_after_an_update(tiny_model_dir, tmp_path):
    weights_dir = str(tiny_model_dir.parent)
    with started(tiny_model_dir, tmp_path, "--weights_dir", weights_dir, work=count_models) as (_, url):
        for version in "123":
            update = {"model_path": tiny_model_dir.name, "weight_version": version}
            assert requests.post(f"{url}/update_weights_from_disk", json=update, timeout=60).json()["success"]
        assert re.findall("(.*) in memory", (tmp_path / "log").read_text()) == ["1"] * 3
