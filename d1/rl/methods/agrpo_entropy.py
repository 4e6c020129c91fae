"""AGRPO (arXiv 2510.04019) as released: steps are drawn in proportion to the entropy of what they reveal.

Release: probablyabot/agrpo@98f1182: train.yaml unchanged, importance_sampling entropy. Entropies are at temperature 1.
The rest is as in agrpo.py.
"""

from __future__ import annotations

from d1.rl.methods.agrpo import AGRPO, AGRPO_SCALE, AGRPO_TRAINED
from d1.rl.methods.entry import Page
from d1.rl.methods.shared import method

METHOD = method(
    "AGRPO, arXiv 2510.04019, steps drawn by entropy, as released",
    AGRPO_SCALE,
    AGRPO_TRAINED,
    **AGRPO,
    draw_steps="entropy",
    page=Page(
        paper="the same",
        scores="the same, drawn by entropy",
        release="the same, train.yaml",
        largest_difference="2e-07",
        differs="as `agrpo`; entropies at temperature 1",
    ),
)
