"""The distillation methods: the states, the target, the divergence and the values of each. Needs no torch.

A trace is a completion with the step in which the sampler revealed each token. All methods train on traces of the model
itself, sampled before the training or during it.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal


@dataclass(frozen=True)
class Method:
    """An entry of `METHODS`. A setting that only the `values` of other entries name is an error for this entry, because
    it would be ignored."""

    states: str  # which parts of a trace are hidden; a name in `STATES` (`d1/distill/states.py`)
    target: str  # what the model is compared with at hidden positions; a name in `TARGETS` (`d1/distill/losses.py`)
    divergence: str  # a name in `DIVERGENCES` (`d1/distill/losses.py`)
    teacher: Literal["itself", "reference"]  # the model that gives the target; the reference has `reference_steps`
    paper: str
    values: Mapping[str, Any]  # settings of `DistillConfig` where the user gives none
    on_policy: bool = False  # traces are sampled during the training; otherwise once, before it
    looks_ahead: bool = False  # the teacher sees tokens of later blocks, which a block-causal model cannot


METHODS = {
    "dparallel": Method(
        states="halves",
        target="own",
        divergence="certainty",
        teacher="itself",
        paper="dParallel, arXiv 2509.26488",
        values={
            **{"keep": "right", "tries": 1, "temperature": 0.0, "tail": -1},
            **{"entropy_weight": 2.0, "entropy_temperature": 0.5},
            **{"learning_rate": 2e-5, "weight_decay": 0.01, "adam_beta2": 0.999, "lr_scheduler_type": "constant"},
            **{"warmup_steps": 0},
        },
    ),
    "t3d": Method(
        states="trace",
        target="rival",
        divergence="discriminator",
        teacher="reference",
        paper="T3D, arXiv 2602.12262",
        values={
            **{"keep": "all", "tries": 1, "temperature": 0.0, "tail": 2, "share_power": 8.0, "reference_steps": 10},
            **{"beta": 0.1, "rival_weight": 0.5, "path_weight": 0.2, "path_tokens": 4},
            **{"learning_rate": 1e-5, "weight_decay": 0.01, "adam_beta2": 0.999, "lr_scheduler_type": "cosine"},
            **{"warmup_steps": 20},
        },
    ),
    "d-opsd": Method(
        states="steps",
        target="best",
        divergence="reverse_kl",
        teacher="reference",
        paper="d-OPSD, arXiv 2606.18195",
        values={
            **{"keep": "right", "tries": 8, "temperature": 0.9, "hints": 0.25, "reference_steps": 0},
            **{"teacher_top_k": 20, "clip": 0.05, "num_iterations": 4},
            **{"learning_rate": 5e-6, "weight_decay": 0.1, "adam_beta2": 0.99, "lr_scheduler_type": "constant"},
            **{"warmup_steps": 0},
        },
        on_policy=True,
        looks_ahead=True,
    ),
}
