"""Weights that a request names."""

from __future__ import annotations

import json
import warnings
from pathlib import Path
from typing import Any

import torch
from peft import PeftModel

from d1.models.adapters import add_adapter
from d1.models.kinds import native_config
from d1.models.load import load_model


def weights_below(root: Path | None, path: str) -> Path:
    """The folder of weights that a request names. Raises ValueError unless it and all of its files lie below `root`."""
    if root is None:
        raise ValueError("this server loads no weights: start it with --weights_dir FOLDER")
    top = root.resolve()
    folder = (top / path).resolve()
    if not folder.is_relative_to(top) or not all(file.resolve().is_relative_to(top) for file in folder.rglob("*")):
        raise ValueError(f"{path} does not lie below the folder that --weights_dir named")
    if not [*folder.glob("*.safetensors")]:
        raise ValueError(f"{path} holds no weights in safetensors")
    for index in folder.glob("*.index.json"):
        if any(Path(name).name != name for name in json.loads(index.read_text())["weight_map"].values()):
            raise ValueError(f"{path}: {index.name} names files in other folders")
    return folder


def loaded(folder: Path, model: Any) -> Any:
    """The model in `folder`, on the CPU, loaded as `model` was; or `model` with the adapter there in place of its own.

    Raises:
        ValueError: the tokenizer and the settings that go with `model` do not fit it, or the adapter does not.
    """
    if (folder / "adapter_config.json").exists():
        return with_adapter(model, str(folder))
    other, _ = native_config(str(folder))
    for name in ("model_type", "vocab_size", "block_size"):
        if getattr(other, name, None) != getattr(model.config, name, None):
            raise ValueError(
                f"{folder}: {name} is {getattr(other, name, None)}, not {getattr(model.config, name, None)}"
            )
    new = load_model(folder, dtype=model.dtype, attn_implementation=model.config._attn_implementation)
    for tensor in (*new.parameters(), *new.buffers()):
        tensor.data = tensor.data.clone()  # else they lie in the file, which may be written anew
    return new


def with_adapter(model: Any, folder: str) -> Any:
    base: Any = model.get_base_model() if isinstance(model, PeftModel) else model
    with torch.device("meta"), warnings.catch_warnings(action="ignore"):  # which say that meta tensors stay so
        add_adapter(type(base)(base.config), folder)  # what does not fit is found before the model changes
    return add_adapter(model.unload() if isinstance(model, PeftModel) else model, folder).eval()
