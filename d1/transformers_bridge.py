"""Everything here that touches what Transformers does not offer in public."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from safetensors import safe_open
from transformers import (
    modeling_utils,
)

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
