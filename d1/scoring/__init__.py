"""Log-probabilities of completions under a masked diffusion model."""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from d1.scoring.estimators import ESTIMATORS as ESTIMATORS
    from d1.scoring.one_step import mean_field_logps as mean_field_logps
    from d1.scoring.rollouts import SampledRows as SampledRows
    from d1.scoring.views import Scores as Scores
    from d1.scoring.views import Views as Views
    from d1.scoring.views import score as score

# Imported when asked for: PyTorch takes seconds, and a module beside them may need none of it.
HOMES = {
    "ESTIMATORS": "estimators",
    "mean_field_logps": "one_step",
    "SampledRows": "rollouts",
    "Scores": "views",
    "Views": "views",
    "score": "views",
}


def __getattr__(name: str) -> Any:
    if name not in HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f"{__name__}.{HOMES[name]}"), name)
