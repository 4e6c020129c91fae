"""Peak memory of loading: the weights are never held twice."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

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


@pytest.mark.slow
@pytest.mark.parametrize("stored", ["float32", "bfloat16"])
@pytest.mark.parametrize("wanted", ["float32", "bfloat16"])
def test_loading_a_gigabyte_takes_less_than_1_3_of_it(tmp_path, kind_dirs, llada_writer, stored, wanted):
    """The peak against the size of the checkpoint, or of the model where its weights are the wider ones."""
    sizes = {"d_model": 1024, "n_heads": 16, "n_kv_heads": 16, "mlp_hidden_size": 3072}
    sizes["n_layers"] = 18 if stored == "float32" else 36
    stored_dtype = getattr(torch, stored)
    folder = llada_writer(tmp_path, stored_dtype, shards=4, embedding_size=16384, vocab_size=16384, **sizes)
    size = size_of(folder)
    assert size > 1e9
    growth, _ = peak_growth(folder, kind_dirs["llada"], wanted)
    result = size * (2 if (stored, wanted) == ("bfloat16", "float32") else 1)
    assert growth < 1.3 * result
