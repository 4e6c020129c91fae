"""The reference of a full fine-tune: the model as it is when training starts."""

from __future__ import annotations

import contextlib
import copy
from collections.abc import Iterator
from typing import Any

import trl.trainer.grpo_trainer as trl_grpo

from d1.models import load_model


@contextlib.contextmanager
def reference_from(model: Any) -> Iterator[None]:
    """TRL reloads a full fine-tune's reference from its path, as a causal model; ours is a copy of the model in memory.

    Delete when TRL's GRPOTrainer takes a reference model.
    """
    original = trl_grpo.create_model_from_path
    trl_grpo.create_model_from_path = lambda *args, **kwargs: reference_copy(model)
    try:
        yield
    finally:
        trl_grpo.create_model_from_path = original


def reference_copy(model: Any) -> Any:
    """A second model with the same weights. Those that ZeRO-3 cut over the ranks on loading are loaded again."""
    if any(hasattr(parameter, "ds_id") for parameter in model.parameters()):
        return load_model(model.name_or_path, dtype=model.dtype)
    return copy.deepcopy(model)
