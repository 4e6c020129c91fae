"""The sum over a trajectory's steps; AGRPO (arXiv 2510.04019) takes their mean.

This library's own: the weights S / n and 1 / (n p_s) are unbiased for the sum over S steps; the released ones give 1
/ S of it (tests/d1/scoring/test_replay.py enumerates both).
"""

from __future__ import annotations

from d1.rl.methods.shared import LINEAR, method

METHOD = method(
    "the sum over a trajectory's steps; AGRPO, arXiv 2510.04019, takes their mean",
    estimator="replay",
    p_mask_prompt=0.0,
    objective="clipped_views",
    loss_type="sum",
    epsilon=0.2,
    beta=0.0,
    num_iterations=1,
    num_views=24,
    draw_steps="entropy",
    scale=dict(learning_rate=5e-06, num_generations=8, **LINEAR),
)
