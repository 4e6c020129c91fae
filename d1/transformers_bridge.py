"""The one place for names that Transformers keeps private: each with the version it was read in, and when it can go."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from safetensors import safe_open
from transformers import PreTrainedModel, modeling_utils
from transformers.utils import cached_file

STORED = {"torch.float32": "F32", "torch.float16": "F16", "torch.bfloat16": "BF16"}  # as safetensors names them


def needs_copy(path: str, dtype: Any, device: Any) -> bool:
    """Whether weights loaded as `dtype` on `device` are copies, not the mapped file of a local folder itself."""
    files = sorted(Path(path).glob("*.safetensors"))
    if dtype == "auto" or not files:
        return False
    with safe_open(files[0], framework="pt") as file:
        stored = file.get_slice(next(iter(file.keys()))).get_dtype()
    return device is not None or STORED.get(f"torch.{str(dtype).removeprefix('torch.')}") != stored


@contextmanager
def reading(copies: bool) -> Iterator[None]:
    """Where weights are copied, have Transformers 5.23 read its files piece by piece rather than map them.

    A mapping stays resident in whole, next to the weights that were converted from it or moved to a device. Without a
    copy the mapping is the model, shared by all processes of a machine. To delete once `from_pretrained` takes
    safetensors' `backend` as an argument.
    """
    library: Any = modeling_utils
    mapped = library.safe_open
    if copies:
        library.safe_open = lambda *args, **kwargs: mapped(*args, **(kwargs | {"backend": "pread"}))
    try:
        yield
    finally:
        library.safe_open = mapped


def attention_kernel(config: Any) -> str | None:
    """The kernel that attention runs on: "sdpa", "eager", "flash_attention_2"...

    Transformers 5.23 keeps it as `_attn_implementation`. To delete once the config has a public name for it.
    """
    return getattr(config, "_attn_implementation", None)


def forget_renaming(model: PreTrainedModel) -> None:
    """Have `save_pretrained` write the names of the model's class, not those of the checkpoint it was read from.

    Transformers 5.23 keeps a `key_mapping` that it used as `_weight_conversions`, and reverses it when it saves. To
    delete once `save_pretrained` can be told so.
    """
    vars(model).pop("_weight_conversions", None)


def has_file(folder: str, name: str) -> bool:
    """Whether the folder or hub name (also without a network: its cache) holds a file `name`.

    Transformers 5.23's `cached_file` raises for a missing one unless told by an argument with an underscore. To delete
    once it, or huggingface_hub, answers the question.
    """
    return cached_file(folder, name, _raise_exceptions_for_missing_entries=False) is not None
