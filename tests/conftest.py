"""Fixtures shared by all rooms: a tiny model that every stage can load from a folder."""

from __future__ import annotations

import functools
import gc
import importlib.metadata
import json
import os
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("WANDB_MODE", "disabled")
torch.set_num_threads(1)

SPECIAL = ["<pad>", "<bos>", "<eos>", "<mask>", "<unk>", "<user>", "<assistant>", "<system>"]
WORDS = [*"abcdefghijklmnopqrstuvwxyz0123456789+-*/=():,.?!", "<reasoning>", "</reasoning>", "<answer>", "</answer>"]
TEMPLATE = (
    "{{ '<bos>' }}{% for message in messages %}<{{ message['role'] }}>{% generation %}{{ message['content'] }}"
    "{% if message['role'] == 'assistant' %}<eos>{% endif %}{% endgeneration %}{% endfor %}"
    "{% if add_generation_prompt %}<assistant>{% endif %}"
)


def save_tiny_model(folder: Path, seed: int = 0) -> Path:
    """A bidirectional Llama of 2 layers with a character tokenizer and a chat template, saved to `folder`."""
    from tokenizers import Regex, Tokenizer, models, pre_tokenizers
    from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

    vocabulary = {token: index for index, token in enumerate([*SPECIAL, *WORDS])}
    backend = Tokenizer(models.WordLevel(vocabulary, unk_token="<unk>"))
    backend.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.WhitespaceSplit(), pre_tokenizers.Split(Regex(r"</?[a-z]+>|."), "isolated")]
    )
    named = {f"{token[1:-1]}_token": token for token in SPECIAL[:5]}
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=backend, **named, additional_special_tokens=SPECIAL[5:], padding_side="left"
    )
    tokenizer.chat_template = TEMPLATE
    tokenizer.save_pretrained(folder)
    torch.manual_seed(seed)
    sizes = {"vocab_size": len(vocabulary), "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2}
    sizes |= {"num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 512}
    ids = {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}
    config = LlamaConfig(**sizes, **ids, is_causal=False, initializer_range=0.2)
    LlamaForCausalLM(config).save_pretrained(folder)
    return folder


def pytest_configure(config: pytest.Config) -> None:
    """Hides GPUs, except from `-m gpu`: tests compare with numbers of a CPU."""
    if config.option.markexpr != "gpu":
        os.environ["CUDA_VISIBLE_DEVICES"] = ""


@pytest.fixture(scope="module", autouse=True)
def quick_garbage_collection() -> None:
    """Leaves imported libraries out of later collections: Accelerate collects at the start of each run, and the objects
    of all libraries take five times as long as a tiny run."""
    gc.collect()
    gc.freeze()


@pytest.fixture(scope="session", autouse=True)
def quick_metadata() -> None:
    """Parses what is installed once: Accelerate asks in each run, thirty times, which packages there are."""
    importlib.metadata.metadata = functools.cache(importlib.metadata.metadata)


@pytest.fixture(scope="session", autouse=True)
def own_caches(tmp_path_factory: pytest.TempPathFactory) -> None:
    """Keeps rows and compiled extensions out of the user's caches, in this process and in those that it starts.

    DeepSpeed compiles once for all parallel workers. A killed build in the user's folder would leave a lock there, and
    every later process would wait for it forever.
    """
    shared = tmp_path_factory.getbasetemp()
    shared = shared.parent if "PYTEST_XDIST_WORKER" in os.environ else shared
    os.environ["TORCH_EXTENSIONS_DIR"] = str(shared / "torch_extensions")
    os.environ["HF_DATASETS_CACHE"] = str(tmp_path_factory.mktemp("datasets"))
    if "datasets" in sys.modules:
        sys.modules["datasets"].config.HF_DATASETS_CACHE = os.environ["HF_DATASETS_CACHE"]


@pytest.fixture(scope="session")
def tiny_model_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Folder of a tiny bidirectional Llama with tokenizer, shared by the session: do not write to it."""
    return save_tiny_model(tmp_path_factory.mktemp("tiny_model"))


@pytest.fixture(scope="session")
def tiny_block_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The same with block-causal attention, in blocks of 4 tokens."""
    folder = save_tiny_model(tmp_path_factory.mktemp("tiny_block_model"))
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"block_size": 4}))
    return folder


@pytest.fixture(scope="session")
def tiny_causal_dir(tiny_model_dir: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny Nemotron-Labs-Diffusion with the same tokenizer: clean text is read from left to right; blocks of 4."""
    from tests.d1.released import CAUSAL, write_with_tokenizer

    return write_with_tokenizer(tmp_path_factory.mktemp("tiny_causal_model"), CAUSAL, tiny_model_dir)


@pytest.fixture(scope="session")
def tiny_canvas_dir(tiny_model_dir: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny DiffusionGemma with the same tokenizer, without its mask token: uniform noise, canvases of 4."""
    from tests.d1.diffusion_gemma import HAS_CLASS, write_with_tokenizer

    if not HAS_CLASS:
        pytest.skip("diffusion_gemma needs Transformers 5.24")
    return write_with_tokenizer(tmp_path_factory.mktemp("tiny_canvas_model"), tiny_model_dir)


@pytest.fixture(autouse=True)
def method_tables() -> Iterator[None]:
    """Removes the rows that a method file adds to the tables after each test, even if the test only reads a command."""
    from d1.rl.tables import TABLES

    before = {table: dict(rows) for table, rows in TABLES.items()}
    yield
    for table, rows in TABLES.items():
        rows.clear()
        rows.update(before[table])
