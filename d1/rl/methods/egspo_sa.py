"""EGSPO with stepwise advantages (arXiv 2603.12554).

    A = [r + lam (r - r_s)] / (1 + lam) minus its mean over the group; r_s: the reward if the model finishes state s
    greedily in one pass; lam: train.sh LAMBDA1 and NORMALIZE_RETURNS

The rest is as in egspo.py.
"""

from __future__ import annotations

from d1.rl.methods.egspo import EGSPO, EGSPO_SCALE, EGSPO_TRAINED
from d1.rl.methods.entry import Page
from d1.rl.methods.shared import method

METHOD = method(
    "EGSPO with stepwise advantages, arXiv 2603.12554",
    EGSPO_SCALE,
    EGSPO_TRAINED,
    **EGSPO,
    state_reward=0.5,
    page=Page(
        paper="the same",
        scores="the same, stepwise advantages",
        release="the same",
        largest_difference="2e-07",
        differs="as `egspo`",
    ),
)
