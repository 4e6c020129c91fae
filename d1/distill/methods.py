"""The distillation methods: the states, the target, the divergence and the values of each. Needs no torch.

A trace is a completion with the step in which the sampler revealed each token. A method trains on traces of the model
itself, which are sampled before the training. The model itself is the teacher, too.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class Method:
    """An entry of `METHODS`."""

    states: str  # which parts of a trace are hidden; a name in `STATES` (`d1/distill/states.py`)
    target: str  # what the model is compared with at hidden positions; a name in `TARGETS` (`d1/distill/losses.py`)
    divergence: str  # a name in `DIVERGENCES` (`d1/distill/losses.py`)
    paper: str
    values: Mapping[str, Any]  # settings of `DistillConfig` where the user gives none


METHODS = {
    "dparallel": Method(
        states="halves",
        target="own",
        divergence="certainty",
        paper="dParallel, arXiv 2509.26488",
        values={
            **{"keep": "right", "temperature": 0.0, "tail": -1},
            **{"entropy_weight": 2.0, "entropy_temperature": 0.5},
            **{"learning_rate": 2e-5, "weight_decay": 0.01, "adam_beta2": 0.999, "lr_scheduler_type": "constant"},
            **{"warmup_steps": 0},
        },
    ),
}
