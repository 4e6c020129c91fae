"""Settings of preference training: the flags of `d1 prefer`. Needs no torch."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated

from d1.preference.methods import METHODS
from d1.ranges import COUNT, POSITIVE, setting
from d1.runs.cli import MethodSettings, OptionalCount

BOUNDS = ("counts", "espo", "elbo")  # the unbiased estimators of the any-order bound, in d1/scoring/elbo.py
SPREADS = ("even", "independent")


@dataclass
class PreferenceConfig(MethodSettings):
    """Arguments of `d1.preference.train.main`. A setting that is None becomes the method's value.

    Raises:
        ValueError: a setting is out of range, or contradicts another.
    """

    method: str = setting("vrpo", f"one of {', '.join(METHODS)}", choices=tuple(METHODS))
    train_data: str = setting(
        "",
        "hub name, or a .json, .jsonl, .parquet or .csv file, with TRL's columns: prompt, chosen, rejected; or "
        "prompt, completion, label; docs/preference.md lists other columns",
    )
    job_name: str = setting("prefer")
    max_completion_length: Annotated[int, COUNT] = setting(
        256, "tokens of the canvas, as in RL and evaluation; rows with a longer completion are bad rows"
    )

    # The bound and the loss
    beta: Annotated[float | None, POSITIVE | None] = setting(None, "weight of the ratios in the loss")
    estimator: str | None = setting(None, "of the bound", choices=BOUNDS)
    num_views: OptionalCount = setting(None, "Monte Carlo draws per bound")
    spread: str | None = setting(None, "counts (times) of a completion's draws: evenly spaced or not", choices=SPREADS)
    antithetic: bool = setting(False, "espo, elbo: each draw also with the opposite mask")
    views_at_once: Annotated[int, COUNT] = setting(1, "draws of a completion per forward pass; more take more memory")

    def __post_init__(self) -> None:
        super().__post_init__()
        self.apply_defaults(METHODS[self.method].values)
        if not self.train_data:
            raise ValueError("--train_data is missing: a file or hub name of preference rows")
        if self.antithetic and self.estimator == "counts":
            raise ValueError(
                "--antithetic needs --estimator espo or elbo: counts hides up to all, whose opposite is none"
            )
