"""Peak memory of loading: the weights are never held twice, not even if experts have to be stacked."""

from __future__ import annotations

import gc
import os
import subprocess
import sys
import threading
import weakref
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers.modeling_utils
from torch.utils._python_dispatch import TorchDispatchMode

from d1.models import load_model
from tests.d1.released import read_files, write_released

pytestmark = pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="reads Linux's own account of memory")

REPO = Path(__file__).parents[3]
SCRIPT = """
import sys, torch
from pathlib import Path
from d1.models import load_model
def peak():
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith("VmHWM"))
load_model(sys.argv[2])  # a tiny one, so that what Python loads once is not counted
before = peak()
model = load_model(sys.argv[1], dtype=getattr(torch, sys.argv[3]))
with torch.no_grad():
    total = sum(p.float().sum().item() for p in model.parameters())  # touch every page
assert total == total
print(peak() - before, max(p.nbytes for p in model.parameters()))
"""


def peak_growth(folder: Path, tiny: Path, dtype: str) -> tuple[int, int]:
    """Bytes by which loading `folder` raises the peak RSS of a fresh process, and bytes of its largest weight."""
    environment = os.environ | {"OMP_NUM_THREADS": "1", "PYTHONPATH": str(REPO), "HF_HUB_OFFLINE": "1"}
    command = [sys.executable, "-c", SCRIPT, str(folder), str(tiny), dtype]
    done = subprocess.run(command, capture_output=True, text=True, env=environment, cwd=folder)
    assert done.returncode == 0, done.stderr
    growth, largest = done.stdout.split()[-2:]
    return int(growth), int(largest)


def size_of(folder: Path) -> int:
    return sum(file.stat().st_size for file in folder.glob("*.safetensors"))


def test_loading_holds_the_weights_once(tmp_path, kind_dirs, llada_writer):
    sizes = {"d_model": 512, "n_heads": 8, "n_kv_heads": 8, "mlp_hidden_size": 1536, "n_layers": 16}
    folder = llada_writer(tmp_path, torch.float32, shards=3, embedding_size=4096, vocab_size=4096, **sizes)
    size = size_of(folder)
    assert size > 200e6
    growth, largest = peak_growth(folder, kind_dirs["llada"], "float32")
    assert 0.9 * size < growth < 1.3 * size + 2 * largest


def test_4bit_weights_keep_no_file_of_16_bit_weights_mapped(tmp_path, llada_writer):
    """Norms and embeddings that lie in the file would keep all its pages, those of the quantised weights included."""
    folder = llada_writer(tmp_path, torch.bfloat16)
    mapped = load_model(folder, torch.bfloat16)
    assert str(folder) in Path("/proc/self/maps").read_text()
    del mapped
    gc.collect()
    model = load_model(folder, torch.bfloat16, quantization="nf4")
    assert str(folder) not in Path("/proc/self/maps").read_text()
    assert model.num_parameters() > 0


class LiveBytes(TorchDispatchMode):
    """Counts the bytes read from files, by any thread, and those made by operations; `peak` is their maximum."""

    def __init__(self) -> None:
        super().__init__()
        self.live = self.peak = 0
        self.known: weakref.WeakSet[Any] = weakref.WeakSet()
        self.lock = threading.RLock()

    def count(self, tensor: Any) -> Any:
        if isinstance(tensor, torch.Tensor) and tensor.device.type != "meta":
            storage = tensor.untyped_storage()
            with self.lock:
                if storage not in self.known:
                    self.known.add(storage)
                    self.live += storage.nbytes()
                    self.peak = max(self.peak, self.live)
                    weakref.finalize(storage, self.free, storage.nbytes())
        return tensor

    def free(self, size: int) -> None:
        with self.lock:
            self.live -= size

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        for tensor in out if isinstance(out, tuple | list) else (out,):
            self.count(tensor)
        return out


class Read:
    """A safetensors file, or one of its slices, whose tensors are counted."""

    def __init__(self, inner: Any, count: Any) -> None:
        self.inner, self.count = inner, count

    def __enter__(self) -> Read:
        return Read(self.inner.__enter__(), self.count)

    def __exit__(self, *error: object) -> None:
        self.inner.__exit__(*error)

    def get_slice(self, name: str) -> Read:
        return Read(self.inner.get_slice(name), self.count)

    def get_tensor(self, name: str) -> torch.Tensor:
        return self.count(self.inner.get_tensor(name))

    def __getitem__(self, where: Any) -> torch.Tensor:
        return self.count(self.inner[where])

    def __getattr__(self, name: str) -> Any:
        return getattr(self.inner, name)


@pytest.mark.parametrize("stacked", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_experts_are_stacked_a_layer_at_a_time(tmp_path, monkeypatch, dtype, stacked):
    sizes = {"hidden_size": 64, "moe_intermediate_size": 64, "num_hidden_layers": 12}
    folder = write_released(tmp_path / "parts", "llada2_moe", torch.float32, shards=3, **sizes)
    if stacked:
        load_model(folder).save_pretrained(tmp_path / "native", save_original_format=False)
        folder = tmp_path / "native"
        assert "model.layers.1.mlp.experts.gate_up_proj" in read_files(folder)
    bytes_ = LiveBytes()
    opened: Any = transformers.modeling_utils.safe_open
    counted = lambda *args, **kwargs: Read(opened(*args, **kwargs), bytes_.count)  # noqa: E731
    monkeypatch.setattr(transformers.modeling_utils, "safe_open", counted)
    with bytes_:
        model = load_model(folder, dtype=dtype)
    whole = sum(p.nbytes for p in model.parameters())
    layer = sum(p.nbytes for p in model.base_model.layers[1].mlp.experts.parameters())
    assert whole > 12 * layer
    assert whole <= bytes_.live <= bytes_.peak < whole + (2 if stacked else 3) * layer
