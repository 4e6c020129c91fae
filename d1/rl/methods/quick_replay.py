"""TraceRL (arXiv 2509.06949) with the threshold rollouts of its SDAR config, at temperature 1.

A name kept from studies/leaderboard; the rest is as in tracerl.py.
"""

from __future__ import annotations

from d1.rl.methods.shared import canvas, method
from d1.rl.methods.tracerl import RIGHT_SHARE, TRACERL, TRACERL_SCALE

METHOD = method(
    "TraceRL, arXiv 2509.06949, with the threshold rollouts of its SDAR config",
    **TRACERL,
    estimator="replay",
    temperature=1.0,  # rldf
    segment_steps=8,  # tracerl
    num_views=4,  # of the merged steps, drawn uniformly; the mean is over the drawn views of all rows
    right_share=RIGHT_SHARE,
    sampler="parallel",  # rldf
    reveal="threshold",
    reveal_level=0.9,
    scale=dict(**TRACERL_SCALE, **canvas(tokens=256, steps=256, block=32)),
)
