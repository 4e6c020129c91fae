"""JustGRPO for models with blocks, as in NeMo-RL, on the least likely quarter of the tokens.

Release: NVIDIA-NeMo/RL@749b0ed research/just_grpo, inference-fast-long.yaml: training_token_fraction .25 of 16
tokens. The rest is as in just_grpo_blocks.py.
"""

from __future__ import annotations

from d1.rl.methods.entry import Page, Trained
from d1.rl.methods.just_grpo_blocks import JUST_GRPO_BLOCKS, JUST_GRPO_BLOCKS_SCALE
from d1.rl.methods.shared import method

METHOD = method(
    "JustGRPO for models with blocks, the least likely quarter of the tokens, as in NeMo-RL",
    trained=Trained(128),
    **JUST_GRPO_BLOCKS,
    num_views=4,
    scale=JUST_GRPO_BLOCKS_SCALE,
    page=Page(
        paper="the same",
        scores="its 4 least likely tokens",
        release="the same",
        largest_difference="5e-07",
        differs="the same",
    ),
)
