"""Rows that are cancelled, fail, are paused and updated at random moments: none is lost and none is mixed."""

from __future__ import annotations

import json
import random
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import requests

from d1.models import load_model
from d1.models.tokenizer import first_end
from d1.sampling import SamplingSettings
from d1.serve.engine import Engine
from tests.conftest import save_tiny_model
from tests.d1.serve.serving import SAMPLERS, Served, alone, asked, check, serving

CLIENTS, LONGEST = 16, 20
CHANGED = "the weights changed in the middle of this stream"


def disturb(served: Served, seed: int, over: threading.Event) -> None:
    """Pauses and updates until the clients are done, and twice each."""
    draw, done = random.Random(seed), {"pause": 0, "update": 0}
    while min(done.values()) < 2 or not over.is_set():
        kind = draw.choice(("pause", "update"))
        if kind == "update":
            name = draw.choice(("one", "two", "three"))
            served.post("/update_weights_from_disk", model_path=name, weight_version=name)
        else:
            with served.paused():
                time.sleep(draw.random() * 0.003)
        done[kind] += 1
        time.sleep(draw.random() * 0.05)


@pytest.fixture
def failing(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Passes that fail at random; their rows begin again one by one, perhaps with other weights. How many rows each."""
    advance, draw, failed = Engine.advance, random.Random(0), list[int]()

    def advancing(self: Engine, key: Any) -> None:
        advance(self, key)
        count = sum(row.lane == key for row in self.rows.values())
        if count > 1 and not key.batch_name and not self.dropped and draw.random() < 0.03:
            failed.append(count)
            raise FloatingPointError("a pass that failed on purpose")

    monkeypatch.setattr(Engine, "advance", advancing)
    return failed


def ask(served: Served, number: int) -> tuple[str, Any]:
    """What became of a request: its kind, and its answer."""
    draw, body = random.Random(f"kind {number}"), asked(number, SAMPLERS, None, LONGEST)
    kind = draw.choice(("whole", "whole", "whole", "cancelled", "stream"))
    if kind == "whole":
        return kind, served.post("/generate", **body)
    if kind == "cancelled":
        try:  # the client closes the connection
            requests.post(f"{served.url}/generate", json=body, timeout=(60, draw.random() * 0.1 + 0.001))
        except requests.ReadTimeout:
            return kind, None
        return "cancelled too late", None
    sent = {"prompt": body["input_ids"], "stream": True, "seed": number, "temperature": 0.7, "max_tokens": LONGEST}
    answer = requests.post(f"{served.url}/v1/completions", json=sent | {"block_length": 4}, timeout=60)
    assert answer.status_code == 200, answer.text
    events = [line[6:] for line in answer.text.split("\n\n") if line]
    parts = [json.loads(event) for event in events if event != "[DONE]"]
    text = "".join(part["choices"][0]["text"] for part in parts if "choices" in part)
    errors = [part["error"]["message"] for part in parts if "error" in part]
    assert len(errors) + (events[-1] == "[DONE]") == 1
    return kind, (text, errors)


@pytest.mark.parametrize("count", [100, pytest.param(1000, marks=pytest.mark.slow)])
def test_no_row_is_lost_or_mixed(tiny_model_dir: Path, tmp_path: Path, count: int, failing: list[int]) -> None:
    folders = {name: save_tiny_model(tmp_path / name, seed) for seed, name in enumerate(("one", "two", "three"), 1)}
    with (
        serving(tiny_model_dir, weights_dir=tmp_path, queue_size=512) as served,
        ThreadPoolExecutor(CLIENTS + 1) as pool,
    ):
        over = threading.Event()
        disturbed = pool.submit(disturb, served, count, over)
        disturbed.add_done_callback(lambda _: served.engine.resume())  # if it failed, its error is the test's
        try:
            found = [*pool.map(lambda number: ask(served, number), range(count))]
        finally:
            over.set()
        disturbed.result()
        served.wait_for("d1_rows_at_work", 0)
        assert served.metric("d1_rows_waiting") == 0
        models = {name: load_model(folder) for name, folder in (folders | {"default": tiny_model_dir}).items()}
        versions, broken = set(), 0
        for number, (kind, answer) in enumerate(found):
            body = asked(number, SAMPLERS, None, LONGEST)
            if kind == "whole":
                version = answer["meta_info"]["weight_version"]
                check(served, body, answer, models[version])
                versions.add(version)
            elif kind == "stream":
                text, errors = answer
                texts = [streamed_text(served, model, number, body["input_ids"]) for model in models.values()]
                assert text in texts if not errors else any(one.startswith(text) for one in texts)
                assert not errors or (text and CHANGED in errors[0])
                broken += bool(errors)
    assert len(versions) >= 2
    assert failing
    kinds = [kind for kind, _ in found]
    assert kinds.count("whole") > count / 2
    assert "cancelled" in kinds
    assert broken < kinds.count("stream") / 2


def streamed_text(served: Served, model: Any, number: int, ids: list[int]) -> str:
    how = SamplingSettings(LONGEST, 4, LONGEST // 2, temperature=0.7)
    mask, ends = served.tokenizer.mask_token_id, [2, 0]
    canvas = alone(model, mask, ids, "seed-0", how, ends, number).ids[0, -LONGEST:].tolist()
    return str(served.tokenizer.decode(canvas[: first_end(canvas, ends)], skip_special_tokens=True))
