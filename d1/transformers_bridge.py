"""Everything here that touches what Transformers does not offer in public."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from safetensors import safe_open
from torch import Tensor
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


# --- Trainer's private names, in Transformers 5.23 --------------------------------------------------------------------
# To delete once a checkpoint holds the losses that were not logged yet, and `train_loss` counts the steps before it.


def unlogged_loss(trainer: Any) -> tuple[Tensor, dict[str, Any]]:
    """The sum of losses since the last log, and what else the Trainer forgets of its losses on a resume."""
    counters = {"last_logged": trainer._globalstep_last_logged, "total_loss": trainer._total_loss_scalar}
    return trainer._tr_loss.detach().cpu().clone(), counters


def restore_loss(trainer: Any, loss: Tensor, counters: dict[str, Any]) -> None:
    """Puts back what `unlogged_loss` gave."""
    trainer._tr_loss = loss
    trainer._globalstep_last_logged = counters["last_logged"]
    trainer._total_loss_scalar = counters["total_loss"]


def mean_loss(trainer: Any) -> float:
    """The mean of all logged losses since step 0; Trainer's own `train_loss` is that since the last resume."""
    return trainer._total_loss_scalar / max(trainer.state.global_step, 1)
