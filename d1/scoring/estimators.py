"""The estimators of log-probabilities, by name. A new one is a file beside this and a line here."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from torch import Generator

from d1.scoring import one_step
from d1.scoring.rollouts import SampledRows
from d1.scoring.views import Views

# What a rollout's rows are scored in, for one update on them. There is one generator a row, so that a row's views do
# not depend on its batch; the settings are those of the run, `DiffuGRPOConfig`.
Draw = Callable[[SampledRows, Sequence[Generator], Any], Views]

ESTIMATORS: dict[str, Draw] = {
    "one_step": one_step.draw,
}
