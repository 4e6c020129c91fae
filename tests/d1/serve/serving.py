"""A server in this process, behind a real port, and what its rows must be: `rollout` of each row alone."""

from __future__ import annotations

import contextlib
import random
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import requests
import torch
import uvicorn

from d1.masking import keyed_generator
from d1.models import load_model, load_tokenizer
from d1.sampling import Rollout, SamplingSettings, rollout
from d1.serve.app import make_app
from d1.serve.engine import Engine, Loader, key_of
from d1.serve.requests import Server

EXACT: list[dict[str, Any]] = [{}, {"sampler": "parallel", "reveal": "factor", "reveal_level": 0.5}, {"cfg_scale": 0.5}]
SAMPLERS = EXACT + [{"sampler": "cached+parallel", "kv_cache": name} for name in ("dual", "lasting")]


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
        until = time.monotonic() + 120
        while self.metric(name) != value:
            assert time.monotonic() < until, f"{name} is {self.metric(name)}, not {value}"
            time.sleep(0.02)

    @contextlib.contextmanager
    def paused(self) -> Iterator[None]:
        self.post("/pause_generation", mode="in_place")
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
    options |= {"weights_dir": (weights_dir,) if weights_dir else (), "loader": Loader(lambda: load_model(folder))}
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
    model: Any, mask: int, ids: list[int], rid: str, settings: SamplingSettings, ends: Any = None, seed: int = 0
) -> Rollout:
    """What `rollout` gives for a row in a batch of its own."""
    text, own = torch.tensor([ids]), [keyed_generator(seed, *key_of(rid))]
    options = {"mask_token_id": mask, "generator": own, "eos_token_ids": ends}
    return rollout(model, text, torch.ones_like(text), settings, **options)


def asked(number: int, samplers: list[dict[str, Any]], block: int | None, longest: int = 40) -> dict[str, Any]:
    """A request of SGLang's dialect with settings of its own."""
    draw = random.Random(number)
    length, ignore = draw.randint(1, longest), draw.random() < 0.5
    params = {"max_new_tokens": length, "temperature": draw.choice([0, 0.7, 1.5]), "ignore_eos": ignore}
    params |= {"block_length": block or draw.randint(1, longest), **draw.choice(samplers), "sampling_seed": number % 3}
    blocks = -(-length // params["block_length"])
    params["steps"] = draw.randint(blocks, length)
    if ignore and number % 2:
        params["eos_stop"] = [*range(10, 30)]
    prompt = [draw.randrange(4, 50) for _ in range(draw.randint(1, 30))]
    rid = f"{number}-5" if number % 4 else f"row {number}"
    body = {"input_ids": prompt, "rid": rid, "sampling_params": params}
    return body | {"return_logprob": True}


def check(served: Served, body: dict[str, Any], answer: dict[str, Any], model: Any = None) -> None:
    """The answer is what `rollout` gives for the row alone, with this model (default: the one that is served)."""
    model = served.engine.model if model is None else model
    params, meta = dict(body["sampling_params"]), answer["meta_info"]
    assert meta["id"] == body["rid"]
    length, seed = params.pop("max_new_tokens"), params.pop("sampling_seed", 0)
    ends = params.pop("eos_stop", None)
    if not params.pop("ignore_eos"):
        ends = [2, 0]
    how = SamplingSettings(length, **params)
    mask = served.tokenizer.mask_token_id
    want = alone(model, mask, body["input_ids"], body["rid"], how, ends, seed)
    ids = want.ids[0, -length:].tolist()
    whole = body["sampling_params"]["ignore_eos"]
    cut = length if whole else next((i + 1 for i, token in enumerate(ids) if token in ends), length)
    assert answer["output_ids"] == ids[:cut], body
    assert meta["completion_tokens"] == cut
    assert meta["forward_passes"] == want.passes.item()
    logps = [entry[0] for entry in meta["output_token_logprobs"]]
    assert logps == pytest.approx(want.logps[0, :cut].tolist(), abs=3e-5)
    assert meta["output_token_entropies"] == pytest.approx(want.entropies[0, :cut].tolist(), abs=3e-5)
    block = getattr(model.config, "block_size", None)
    expected: list[int] = []  # steps that begin with 1 in each block
    for size in map(sum, how.schedule(len(body["input_ids"]) % block if block else None)):
        steps = want.reveal_steps[0, len(expected) : len(expected) + size].tolist()
        first = min((step for step in steps if step >= 0), default=0)
        expected += [step - first + 1 if step >= 0 else 0 for step in steps]
    assert meta["step_maps"] == expected[:cut]
