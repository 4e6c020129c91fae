"""SGLang as a process, and models in released formats for it."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import requests
import torch
from transformers import Qwen3Config, Qwen3ForCausalLM

from d1.models import load_tokenizer
from tests.commands import ROOT
from tests.conftest import save_tiny_model
from tests.d1.released import write_released

BLOCK = 8
STARTS = 900  # seconds that a start may take


def write_sdar(folder: Path, seed: int = 0, spread: float = 0.3) -> Path:
    """A pocket model with random weights as SDAR is released, with a tokenizer of characters."""
    tokenizer = load_tokenizer(str(save_tiny_model(folder)))  # whose model is replaced
    shape = {"hidden_size": 64, "intermediate_size": 192, "num_hidden_layers": 4, "num_attention_heads": 4}
    shape |= {"num_key_value_heads": 2, "head_dim": 16, "max_position_embeddings": 256, "initializer_range": spread}
    ids = {name: getattr(tokenizer, name) for name in ("bos_token_id", "eos_token_id", "pad_token_id")}
    torch.manual_seed(seed)
    Qwen3ForCausalLM(Qwen3Config(vocab_size=len(tokenizer), **shape, **ids)).save_pretrained(folder)
    config = json.loads((folder / "config.json").read_text())
    config = {name: value for name, value in config.items() if name not in ("rope_parameters", "layer_types")}
    config |= {"model_type": "sdar", "architectures": ["SDARForCausalLM"], "rope_theta": 1e6, "block_size": BLOCK}
    (folder / "config.json").write_text(json.dumps(config | {"mask_token_id": tokenizer.mask_token_id}))
    return folder


def write_mixture(folder: Path, kind: str) -> Path:
    """A pocket mixture of experts with random weights, without a tokenizer."""
    torch.manual_seed(0)
    name = {"sdar_moe": "SDARMoeForCausalLM", "llada2_moe": "LLaDA2MoeModelLM"}[kind]
    # On a CPU, SGLang leaves out the factor by which LLaDA2 scales the experts' sum (2.5).
    scaling = {"routed_scaling_factor": 1.0} if kind == "llada2_moe" else {}
    return write_released(folder, kind, architectures=[name], auto_map={}, block_size=BLOCK, **scaling)


@contextlib.contextmanager
def sglang(model: Path, log: Path, *flags: str, algorithm: str = "D1") -> Iterator[str]:
    """The address of a server that runs the algorithm; the server ends with the block."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    words = ["--model-path", model, "--port", port, "--dllm-algorithm", algorithm, "--max-running-requests", 32]
    words += ["--device", "cpu", "--attention-backend", "torch_native", "--dtype", "float32", "--skip-tokenizer-init"]
    words += ["--max-total-tokens", 4096]  # else it takes most of the memory that is free for its cache
    command = [sys.executable, "-m", "sglang.launch_server", *words, "--log-level", "warning", *flags]
    environment = os.environ | {"PYTHONPATH": str(ROOT / "tests" / "sglang" / "stubs"), "SGLANG_USE_CPU_ENGINE": "1"}
    environment["SGLANG_NCCL_SO_PATH"] = "none"  # with CUDA's NCCL, several processes expect a GPU
    with log.open("w") as written:
        server = subprocess.Popen(
            [*map(str, command)], env=environment, stdout=written, stderr=subprocess.STDOUT, start_new_session=True
        )
        try:
            url, until = f"http://127.0.0.1:{port}", time.monotonic() + STARTS
            while not answers(url):
                if server.poll() is not None or time.monotonic() > until:
                    raise RuntimeError(f"SGLang does not start: {log.read_text()[-3000:]}")
                time.sleep(0.5)
            yield url
        finally:
            os.killpg(server.pid, signal.SIGKILL)
            server.wait()


def answers(url: str) -> bool:
    try:
        return requests.get(f"{url}/health", timeout=10).status_code == 200
    except requests.RequestException:
        return False
