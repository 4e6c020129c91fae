"""What a model path names, read once, and whether its weights fit the memory of the machine."""

from __future__ import annotations

import json
import shutil
from types import SimpleNamespace

import pytest

from d1.models import load_model, memory
from d1.models.folder import ModelFolder


def test_a_folder_names_base_adapters_and_the_length_of_completions(tiny_model_dir, tmp_path):
    """Read from files that are written here by hand."""
    base, adapter = shutil.copytree(tiny_model_dir, tmp_path / "base"), tmp_path / "adapter"
    (base / "generation_config.json").write_text(json.dumps({"max_new_tokens": 96}))
    adapter.mkdir()
    (adapter / "adapter_config.json").write_text(
        json.dumps({"peft_type": "LORA", "base_model_name_or_path": str(base), "target_modules": ["q_proj"]})
    )
    (adapter / "adapter_model.safetensors").touch()
    folder = ModelFolder.read(adapter)
    assert (folder.path, folder.base, folder.adapters) == (str(adapter), str(base), (str(adapter),))
    assert ModelFolder.read(base, adapter).adapters == (str(adapter),)
    assert folder.config.hidden_size == json.loads((base / "config.json").read_text())["hidden_size"]
    assert folder.gen_length == 96
    assert ModelFolder.read(tiny_model_dir).gen_length is None


@pytest.mark.parametrize(("dtype", "size"), [("float32", 4), ("bfloat16", 2)])
def test_weights_are_refused_exactly_where_they_exceed_free_memory(tiny_model_dir, monkeypatch, dtype, size):
    needed = size * sum(weight.numel() for weight in load_model(tiny_model_dir).parameters())
    folder = ModelFolder.read(tiny_model_dir)
    for free in (needed, needed - 1):
        monkeypatch.setattr(memory.psutil, "virtual_memory", lambda free=free: SimpleNamespace(available=free))
        if free == needed:
            memory.check_memory(folder, dtype)
            continue
        with pytest.raises(ValueError, match=f"{tiny_model_dir}: its weights take .* as {dtype}, and"):
            memory.check_memory(folder, dtype)
