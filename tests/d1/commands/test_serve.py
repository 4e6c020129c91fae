"""`d1 serve` as users start it: it says where it listens, answers curl, and drains when it is told to end."""

from __future__ import annotations

import json
import re
import signal
import subprocess
import sys

import pytest
import requests

from d1.__main__ import make_parser

PROMPT = {"input_ids": [5, 6], "sampling_params": {"max_new_tokens": 200, "ignore_eos": True, "block_length": 200}}


def test_a_signal_ends_it_after_the_last_answer(tiny_model_dir):
    words = [sys.executable, "-m", "d1", "serve", str(tiny_model_dir), "--port", "0", "--batch_size", "4"]
    process = subprocess.Popen(words, stderr=subprocess.PIPE, text=True)
    try:
        lines = iter(process.stderr.readline, "")
        url = next(found[1] for line in lines if (found := re.match(r"Serving .* on (http://127.0.0.1:\d+)$", line)))
        curl = ["curl", "-s", f"{url}/generate", "-H", "Content-Type: application/json", "-d", json.dumps(PROMPT)]
        asked = [subprocess.Popen(curl, stdout=subprocess.PIPE) for _ in range(6)]
        while "d1_rows_at_work 4.0" not in requests.get(f"{url}/metrics", timeout=60).text:
            assert process.poll() is None
        process.send_signal(signal.SIGTERM)
        answers = [json.loads(one.communicate()[0]) for one in asked]
        assert [len(answer["output_ids"]) for answer in answers] == [200] * 6
        assert process.wait(60) == 0
        with pytest.raises(requests.ConnectionError):
            requests.get(f"{url}/health", timeout=60)
        assert process.stderr.read() == ""
    finally:
        process.kill()
        process.wait()


def test_flags_that_make_no_sense_are_refused():
    with pytest.raises(ValueError, match="--port 70000"):
        make_parser().parse_args(["serve", "m", "--port", "70000"])
    assert make_parser().parse_args(["serve", "m"]).host == "127.0.0.1"
