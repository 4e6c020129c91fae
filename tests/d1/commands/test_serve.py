"""`d1 serve` as users start it: it says where it listens, answers curl, and drains when it is told to end."""

from __future__ import annotations

import json
import re
import subprocess
import time

import pytest
import requests

from d1.__main__ import make_parser
from tests import forks

PROMPT = {"input_ids": [5, 6], "sampling_params": {"max_new_tokens": 200, "ignore_eos": True, "block_length": 200}}


def test_a_signal_ends_it_after_the_last_answer(tiny_model_dir, tmp_path):
    words, log = ["serve", str(tiny_model_dir), "--port", "0", "--batch_size", "4"], tmp_path / "log"
    (process,) = forks.start(forks.module, "d1", *words, log=log, folder=tmp_path)
    try:
        while not (found := re.search(r"^Serving .* on (http://127.0.0.1:\d+)\n", log.read_text(), re.MULTILINE)):
            assert process.is_alive()
            time.sleep(0.05)
        curl = ["curl", "-s", f"{found[1]}/generate", "-H", "Content-Type: application/json", "-d", json.dumps(PROMPT)]
        asked = [subprocess.Popen(curl, stdout=subprocess.PIPE) for _ in range(6)]
        while "d1_rows_at_work 4.0" not in requests.get(f"{found[1]}/metrics", timeout=60).text:
            assert process.is_alive()
        process.terminate()
        answers = [json.loads(one.communicate()[0]) for one in asked]
        assert [len(answer["output_ids"]) for answer in answers] == [200] * 6
        assert forks.finish([process], log, timeout=60).endswith(found[0])
        with pytest.raises(requests.ConnectionError):
            requests.get(f"{found[1]}/health", timeout=60)
    finally:
        forks.kill([process])


def test_flags_that_make_no_sense_are_refused():
    with pytest.raises(ValueError, match="--port 70000"):
        make_parser().parse_args(["serve", "m", "--port", "70000"])
    assert make_parser().parse_args(["serve", "m"]).host == "127.0.0.1"
