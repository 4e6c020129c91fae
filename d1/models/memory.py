"""Whether the weights of a model fit the memory of a machine without a GPU."""

from __future__ import annotations

import copy
import os
from typing import Any

import psutil
import torch
from transformers import PreTrainedConfig

from d1.models.folder import ModelFolder
from d1.models.load import auto_class, named_dtype, prepare

GB = 10**9


def meta_model(config: PreTrainedConfig, dtype: torch.dtype) -> Any:
    """A model of this config on the meta device: its weights have shapes, and no memory."""
    with torch.device("meta"):
        # Transformers chooses the kernel: the one that a config names may be missing, or not run on fake tensors.
        return prepare(auto_class(config).from_config(config, dtype=dtype, attn_implementation=None))


def check_memory(folder: ModelFolder, dtype: str | None = None) -> None:
    """Refuse (ValueError) weights that exceed the free memory of a machine without a GPU, before they are read."""
    if torch.cuda.is_available():
        return
    config = copy.deepcopy(folder.config)  # Transformers writes the dtype and the kernel into it
    model = meta_model(config, named_dtype(dtype))
    copies = int(os.environ.get("LOCAL_WORLD_SIZE", "1"))
    needed = copies * sum(weight.numel() * weight.element_size() for weight in model.parameters())
    free = psutil.virtual_memory().available
    if needed > free:
        name = str(named_dtype(dtype)).removeprefix("torch.")
        processes = ""
        if copies > 1:
            processes = f" in {copies} processes"
        advice = "use a machine with a GPU or with more memory"
        if name == "float32":
            advice = f"pass --dtype bfloat16, which takes half, or {advice}"
        raise ValueError(
            f"{folder.path}: its weights take {needed / GB:.1f} GB as {name}{processes}, and {free / GB:.1f} GB of "
            f"memory are free: {advice}"
        )
