"""Weights that a request names."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

from d1.models.kinds import native_config


def weights_below(root: Path | None, path: str, config: Any) -> Path:
    """The folder of weights that a request names. Raises ValueError unless it and all of its files lie below `root`,
    and it holds a model that the tokenizer and the settings of the one with this `config` fit."""
    if root is None:
        raise ValueError("this server loads no weights: start it with --weights_dir FOLDER")
    top = root.resolve()
    folder = (top / path).resolve()
    if not folder.is_relative_to(top) or not all(file.resolve().is_relative_to(top) for file in folder.rglob("*")):
        raise ValueError(f"{path} does not lie below the folder that --weights_dir named")
    if not [*folder.glob("*.safetensors")] or (folder / "adapter_config.json").exists():
        raise ValueError(f"{path} is no folder of a whole model in safetensors; merge an adapter first")
    for index in folder.glob("*.index.json"):
        if any(Path(name).name != name for name in json.loads(index.read_text())["weight_map"].values()):
            raise ValueError(f"{path}: {index.name} names files in other folders")
    other, _ = native_config(str(folder))
    for name in ("model_type", "vocab_size", "block_size"):
        if getattr(other, name, None) != getattr(config, name, None):
            raise ValueError(f"{path}: {name} is {getattr(other, name, None)}, not {getattr(config, name, None)}")
    return folder


def loader(folder: Path, model: Any) -> Callable[[], Any]:
    """Loads the model in `folder`, onto the CPU, as `model` was loaded."""
    from d1.models import load_model

    dtype, attention = model.dtype, model.config._attn_implementation

    def load() -> Any:
        new = load_model(folder, dtype=dtype, attn_implementation=attention)
        for tensor in (*new.parameters(), *new.buffers()):
            tensor.data = tensor.data.clone()  # else they lie in the file, which may be written anew
        return new

    return load
