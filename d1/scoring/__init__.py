"""Log-probabilities of completions under a masked diffusion model."""

from __future__ import annotations

from typing import TYPE_CHECKING

from d1.lazy import lazily

if TYPE_CHECKING:
    from d1.scoring.entry import Estimator as Estimator
    from d1.scoring.estimators import ESTIMATORS as ESTIMATORS
    from d1.scoring.inputs import Randomness as Randomness
    from d1.scoring.inputs import SampledRows as SampledRows
    from d1.scoring.inputs import ViewSettings as ViewSettings
    from d1.scoring.one_step import mean_field_logps as mean_field_logps
    from d1.scoring.views import Scores as Scores
    from d1.scoring.views import Views as Views
    from d1.scoring.views import score as score
    from d1.scoring.views import views_of_canvas as views_of_canvas

HOMES = {
    "ESTIMATORS": "estimators",
    "Estimator": "entry",
    **dict.fromkeys(("Randomness", "SampledRows", "ViewSettings"), "inputs"),
    **dict.fromkeys(("Scores", "Views", "score", "views_of_canvas"), "views"),
    "mean_field_logps": "one_step",
}
__getattr__ = lazily(__name__, HOMES)
