"""Weights that a request names."""

from __future__ import annotations

import copy
import os
import shutil
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from weakref import WeakSet

from peft import PeftModel

from d1.files import check_files
from d1.models.adapters import add_adapter
from d1.models.kinds import native_config
from d1.models.load import load_model

RAM_DISK = Path("/dev/shm")
SPARE = 1.1  # of the weights' size that must be free


def has_room(folder: Path, size: int) -> bool:
    """Whether weights of `size` bytes can be written to the folder."""
    return folder.is_dir() and os.access(folder, os.W_OK) and shutil.disk_usage(folder).free >= SPARE * size


def weights_below(roots: Sequence[Path], path: str) -> Path:
    """The folder of weights that a request names; a relative name is looked for in each of `roots`.

    Raises:
        ValueError: it does not lie below one of `roots` with all of its files.
    """
    if not roots:
        raise ValueError("this server loads no weights: start it with --weights_dir FOLDER")
    for top in [root.resolve() for root in roots]:
        folder = (top / path).resolve()
        if folder.is_relative_to(top) and folder.is_dir():
            break
    else:
        raise ValueError(f"{path} is no folder below one that --weights_dir named")
    if not all(file.resolve().is_relative_to(top) for file in folder.rglob("*")):
        raise ValueError(f"{path} holds links to files that do not lie below {top}")
    if not [*folder.glob("*.safetensors")]:
        raise ValueError(f"{path} holds no weights in safetensors")
    check_files(folder)
    return folder


@dataclass
class Loader:
    """Loads new weights. An adapter comes on top of the model that the server was started from, which `start` loads."""

    start: Callable[[], Any]
    others: WeakSet[Any] = field(default_factory=WeakSet)  # models with other weights than that one

    def load(self, folder: Path, model: Any) -> Any:
        """`loaded`; or the model that the server was started from with the adapter in `folder`. `model`, which is in
        use, does not change."""
        if not (folder / "adapter_config.json").exists():
            new = loaded(folder, model)
            self.others.add(new)
            return new
        return with_adapter(self.start() if model in self.others else model, str(folder))


def loaded(folder: Path, model: Any) -> Any:
    """The model in `folder`, on the CPU, loaded as `model` was.

    Raises:
        ValueError: the tokenizer and the settings that go with `model` do not fit it.
    """
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
    """A model that shares the weights of `model` and has the adapter in `folder` in place of its own."""
    shared = {id(tensor): tensor for tensor in (*model.parameters(), *model.buffers())}
    twin = copy.deepcopy(model, shared)
    return add_adapter(twin.unload() if isinstance(twin, PeftModel) else twin, folder).eval()
