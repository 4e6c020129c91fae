"""What a server's defaults leave to a request: `Server.settings`."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from d1.models import load_model, load_tokenizer
from d1.sampling import SamplingSettings
from d1.serve.engine import Engine
from d1.serve.requests import SamplingParams, Server

EDITING = {"sampler": "parallel", "editing": "quality"}


@pytest.fixture(scope="module")
def servers(tiny_model_dir, tiny_causal_dir):
    """Servers by the attention of their model: full, and with a causal context."""
    found = {}
    for name, folder in {"full": tiny_model_dir, "causal": tiny_causal_dir}.items():
        tokenizer = load_tokenizer(folder)
        engine = Engine(load_model(folder), tokenizer.mask_token_id, batch_size=1, queue_size=1, version="default")
        found[name] = Server(engine, tokenizer, name, SamplingSettings(32, 32, 8))
    return found


def settings_of(server: Server, defaults: dict[str, Any], request: dict[str, Any]) -> SamplingSettings:
    server = replace(server, defaults=replace(server.defaults, **defaults))
    params = SamplingParams(**request)
    return server.settings(params, params.max_new_tokens)


@pytest.mark.parametrize(
    ("defaults", "request_", "expected"),
    [
        (EDITING, {}, {"edits": 0.5, "level": 0.7}),
        (EDITING, {"sampler": "exact"}, {"edits": None, "rule": None}),
        (EDITING, {"sampler": "cached"}, {"edits": None, "cache": "dual"}),
        (EDITING, {"sampler": "parallel"}, {"edits": None, "level": 0.9}),
        (EDITING | {"max_post_steps": 3}, {"reveal": "factor"}, {"edits": None, "post_steps": 0}),
        (EDITING, {"reveal": "threshold"}, {"edits": 0.5}),
        (
            {"sampler": "parallel", "reveal_level": 0.8, "edit_threshold": 0.9, "max_post_steps": 3},
            {"editing": "speed"},
            {"level": 0.5, "edits": 0.0, "post_steps": 3},
        ),
        ({"sampler": "parallel", "reveal_level": 0.8}, {"editing": "speed", "reveal_level": 0.6}, {"level": 0.6}),
        ({"sampler": "parallel", "reveal": "factor"}, {"editing": "speed"}, {"rule": "threshold", "edits": 0.0}),
        ({"remasking": "random"}, {"sampler": "parallel"}, {"rule": "threshold", "remasking": "low_confidence"}),
        ({"remasking": "random"}, {"sampler": "exact"}, {"remasking": "random"}),
        ({"sampler": "parallel", "reveal_level": 0.8}, {"reveal": "entropy"}, {"level": 0.1}),
        ({"sampler": "parallel", "reveal_level": 0.8}, {"reveal": "threshold"}, {"level": 0.8}),
        ({"sampler": "parallel", "reveal_level": 0.8}, {"temperature": 0.5}, {"level": 0.8}),
    ],
)
def test_a_default_that_contradicts_the_request_is_left_out(servers, defaults, request_, expected):
    settings = settings_of(servers["full"], defaults, request_)
    assert {name: getattr(settings, name) for name in expected} == expected


def test_editing_of_a_canvas_in_one_large_block_is_refused(servers, monkeypatch):
    """Its record has a place per position and pass of the block."""
    monkeypatch.setattr("d1.serve.requests.MAX_WRITES", 32 * (32 + 3))
    request = {"max_new_tokens": 32, "block_length": 32, "max_post_steps": 3}
    assert settings_of(servers["full"], EDITING, request).max_writes == 35
    with pytest.raises(ValueError, match="may be written 36 times"):
        settings_of(servers["full"], EDITING, request | {"max_post_steps": 4})


@pytest.mark.parametrize(
    ("defaults", "request_", "steps"),
    [
        ({"first_token": "causal"}, {"block_length": 4, "max_new_tokens": 32}, 16),
        ({"first_token": "masked", "steps": 16}, {"first_token": "causal", "block_length": 2, "max_new_tokens": 4}, 4),
        ({"first_token": "masked"}, {"block_length": 4, "max_new_tokens": 32}, 8),
    ],
)
def test_steps_that_are_left_out_are_as_many_as_the_blocks_need(servers, defaults, request_, steps):
    assert settings_of(servers["causal"], defaults, request_).steps == steps
