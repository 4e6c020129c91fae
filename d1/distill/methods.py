"""The distillation methods and their values. Needs no torch.

A trace is a completion with the step in which the sampler revealed each token. A method trains on traces of the model
itself, which are sampled before the training.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class Method:
    """An entry of `METHODS`."""

    paper: str
    values: Mapping[str, Any]  # settings of `DistillConfig` where the user gives none


METHODS = {
    "dparallel": Method(
        paper="dParallel, arXiv 2509.26488",
        values={
            "keep": "right",
            "temperature": 0.0,
            "tail": -1,
            "entropy_weight": 2.0,
            "entropy_temperature": 0.5,
            "learning_rate": 2e-5,
            "weight_decay": 0.01,
            "adam_beta2": 0.999,
            "lr_scheduler_type": "constant",
            "warmup_steps": 0,
        },
    ),
}
