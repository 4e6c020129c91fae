"""A model with a causal context, and fixtures of the tests of RL on servers."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest
import torch

from d1.models import load_tokenizer
from d1.serve import KEY
from tests.d1.released import CAUSAL, write_released


@pytest.fixture
def server_key(monkeypatch):
    """The key of the fleet's servers, where trainers look for it."""
    from tests.d1.rl.fleet import SECRET  # only here: it imports the server

    monkeypatch.setenv(KEY, SECRET)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """Of a module's runs; servers read weights below it."""
    return tmp_path_factory.mktemp("runs")


@pytest.fixture(scope="session")
def tiny_causal_dir(tiny_model_dir: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny Nemotron-Labs-Diffusion with the tokenizer of the other tiny models."""
    tokenizer, folder = load_tokenizer(str(tiny_model_dir)), tmp_path_factory.mktemp("causal") / "model"
    torch.manual_seed(0)
    ids = {name: getattr(tokenizer, name) for name in ("mask_token_id", "pad_token_id", "eos_token_id", "bos_token_id")}
    write_released(folder, CAUSAL, vocab_size=len(tokenizer), **ids)
    for file in tiny_model_dir.glob("*token*"):
        shutil.copy(file, folder)
    for file in tiny_model_dir.glob("chat_template*"):
        shutil.copy(file, folder)
    return folder
