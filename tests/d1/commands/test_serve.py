"""`d1 serve` as users start it: it says where it listens, answers curl, and drains when it is told to end."""

from __future__ import annotations

import json
import re
import socket
import subprocess
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from multiprocessing.process import BaseProcess
from pathlib import Path

import pytest
import requests

from d1.__main__ import main, make_parser
from tests import forks

PROMPT = {"input_ids": [5, 6], "sampling_params": {"max_new_tokens": 200, "ignore_eos": True, "block_length": 200}}
LONG = {"block_length": 1, "steps": 400, "max_tokens": 400, "ignore_eos": True, "prompt": "a b"}


@contextmanager
def started(model: Path, folder: Path, *flags: str) -> Iterator[tuple[BaseProcess, str]]:
    """A process of `d1 serve`, and its address once it listens."""
    words, log = ["serve", str(model), "--port", "0", "--batch_size", "4", *flags], folder / "log"
    (process,) = forks.start(forks.module, "d1", *words, log=log, folder=folder)
    try:
        while not (found := re.search(r"^Serving .* on (http://127.0.0.1:\d+)\n", log.read_text(), re.MULTILINE)):
            assert process.is_alive()
            time.sleep(0.05)
        yield process, found[1]
    finally:
        forks.kill([process])


def wait_for(process: BaseProcess, url: str, line: str) -> None:
    while line not in requests.get(f"{url}/metrics", timeout=60).text:
        assert process.is_alive()


def test_a_signal_ends_it_after_the_last_answer(tiny_model_dir, tmp_path):
    with started(tiny_model_dir, tmp_path) as (process, url):
        curl = ["curl", "-s", f"{url}/generate", "-H", "Content-Type: application/json", "-d", json.dumps(PROMPT)]
        asked = [subprocess.Popen(curl, stdout=subprocess.PIPE) for _ in range(6)]
        wait_for(process, url, "d1_rows_at_work 4.0")
        process.terminate()
        answers = [json.loads(one.communicate()[0]) for one in asked]
        assert [len(answer["output_ids"]) for answer in answers] == [200] * 6
        assert forks.finish([process], tmp_path / "log", timeout=60).endswith(f"{url}\n")
        with pytest.raises(requests.ConnectionError):
            requests.get(f"{url}/health", timeout=60)


def test_rows_that_are_cut_off_by_the_end_get_what_they_have(tiny_model_dir, tmp_path):
    with started(tiny_model_dir, tmp_path, "--drain_seconds", "0") as (process, url), ThreadPoolExecutor(20) as pool:
        whole = {"max_new_tokens": 400, **{name: LONG[name] for name in ("block_length", "steps", "ignore_eos")}}
        bodies = [("/v1/completions", LONG), ("/v1/completions", LONG | {"stream": True})]
        bodies += [("/generate", {"input_ids": [5, 6], "sampling_params": whole})] * 18  # 16 of these wait

        def ask(path, body):
            return requests.post(f"{url}{path}", json=body, timeout=60)

        first = [pool.submit(ask, *body) for body in bodies[:4]]
        wait_for(process, url, "d1_rows_at_work 4.0")
        later = [pool.submit(ask, *body) for body in bodies[4:]]
        wait_for(process, url, "d1_rows_waiting 16.0")
        process.terminate()
        found, waited = ([one.result() for one in some] for some in (first, later))
        forks.finish([process], tmp_path / "log", timeout=60)
    assert [one.status_code for one in found] == [200] * 4
    answer = found[0].json()
    assert answer["choices"][0]["finish_reason"] == "abort"
    assert 0 < answer["usage"]["completion_tokens"] < 400
    assert answer["choices"][0]["text"]
    events = [json.loads(line[6:]) for line in found[1].text.split("\n\n") if line and "DONE" not in line]
    assert events[-1]["choices"][0]["finish_reason"] == "abort"
    assert "".join(event["choices"][0]["text"] for event in events)
    for answer in (one.json() for one in found[2:]):
        meta = answer["meta_info"]
        assert meta["finish_reason"] == {"type": "abort", "message": "the server is stopping"}
        assert 0 < len(answer["output_ids"]) == meta["completion_tokens"] < 400
    assert {one.status_code for one in waited} == {503}


def test_it_listens_locally_and_a_busy_port_is_named_before_the_model_is_loaded(tmp_path):
    assert make_parser().parse_args(["serve", "m"]).host == "127.0.0.1"
    nothing = str(tmp_path / "no model")
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        with pytest.raises(OSError, match=f"--host 127.0.0.1 --port {port}: Address already in use: choose another"):
            main(make_parser().parse_args(["serve", nothing, "--port", str(port)]))
    with pytest.raises(OSError, match=r"--host 203\.0\.113\.1 --port 30000: Cannot assign"):
        main(make_parser().parse_args(["serve", nothing, "--host", "203.0.113.1", "--api_key", "x"]))
