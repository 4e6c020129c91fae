"""The preference methods: the loss, the ratio and the values of each. Needs no torch.

The ratio of a completion is the bound of its log-probability under the policy, less its bound under the reference, both
in the same views.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class Method:
    """An entry of `METHODS`."""

    loss: str  # its name in `LOSSES` (`d1/preference/trainer.py`)
    paper: str  # where it is from
    values: Mapping[str, Any]  # settings of `PreferenceConfig` where the user gives none
    paired: bool = True  # rows are pairs (`chosen`, `rejected`); otherwise single completions with a `label`
    per_canvas_token: bool = False  # the ratio is divided by the tokens of the canvas
    centred: bool = False  # the mean ratio of the optimizer step is subtracted from each ratio, without a gradient


COMMON = {"estimator": "counts", "lr_scheduler_type": "cosine", "weight_decay": 0.01, "adam_beta2": 0.95}
METHODS = {
    # The Monte Carlo draws of a bound all differ in the count, and these counts are spread evenly.
    "vrpo": Method(
        "dpo",
        "LLaDA 1.5, arXiv 2505.19223",
        COMMON | {"beta": 0.2, "num_views": 8, "spread": "even", "learning_rate": 5e-7, "warmup_steps": 15},
    ),
    # DARE divides the bound by the padded width, so the same beta is weaker by that factor.
    "vrpo-dare": Method(
        "dpo",
        "VRPO as DARE trains it, github.com/yjyddq/DARE",
        COMMON
        | {
            "beta": 0.2,
            "num_views": 4,
            "spread": "even",
            "learning_rate": 5e-7,
            "lr_scheduler_type": "constant",
            "warmup_steps": 0,
            "adam_beta2": 0.999,
        },
        per_canvas_token=True,
    ),
    "elbo-kto": Method(
        "kto",
        "ELBO-KTO, arXiv 2510.23658",
        COMMON | {"beta": 0.1, "num_views": 8, "spread": "independent", "learning_rate": 1e-6, "warmup_steps": 0.03},
        paired=False,
        centred=True,
    ),
}
