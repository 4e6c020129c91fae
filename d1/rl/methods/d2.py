"""d2-StepMerge (arXiv 2509.21474): the steps are cut into segments, each scored in the state at its beginning.

    loss = -min(rho A, clip(rho) A) per token, with d1's clip, KL and prompt masks

Release: kuleshov-group/d2@381b9f1 diffu-grpo: bash_scripts/sudoku_d2stepmerge_N16.sh, train.yaml,
diffu_grpo_trainer.py. Differs: one micro-batch scores all segments of its rows.
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from d1.rl.methods.d1 import D1_TRAINED
from d1.rl.methods.entry import Page
from d1.rl.methods.shared import canvas, method
from d1.scoring import Estimator
from d1.scoring.entry import always, reveal_steps

if TYPE_CHECKING:
    from d1.scoring import Randomness, SampledRows, Views, ViewSettings


def number_of_segments(settings: ViewSettings) -> int:
    return min(settings.segments or settings.steps, settings.steps)


def draw_segments(sampled: SampledRows, random: Randomness, settings: ViewSettings) -> Views:
    """Cut all the steps that a canvas can take into equal segments, the same for every row. All segments hide the same
    tokens of the prompt."""
    import torch

    from d1.scoring.inputs import draw_hidden_prompt
    from d1.scoring.replay import WrittenTokens, replay_views

    written = WrittenTokens.from_rows(sampled)
    if sampled.blocks is not None:  # each block has its share of the steps
        settings = replace(settings, steps=-(-settings.steps * settings.block_length // settings.gen_length))
    count = number_of_segments(settings)
    chosen = torch.arange(count, device=written.steps.device).expand(len(written.steps), -1)
    hidden_prompt = draw_hidden_prompt(sampled, random, settings.p_mask_prompt, 1)
    ones = torch.ones_like(chosen, dtype=torch.float)
    return replay_views(hidden_prompt, written.with_segments(written.steps * count // settings.steps), chosen, ones)


ESTIMATORS = {
    "segments": Estimator(
        draw_segments,
        number_of_segments,
        replays=True,
        replays_writes=True,
        covers=always,
        reads=reveal_steps,
        settings=("segments",),
    ),
}


METHOD = method(
    "d2-StepMerge, arXiv 2509.21474",
    trained=D1_TRAINED,  # accumulation 32: 16 segments of the same rows, twice
    estimator="segments",  # all of them in every update, each in the state at its beginning
    objective="clipped_views",  # clip, beta and prompt masks are d1's: train.yaml
    num_iterations=8,  # NUM_ITER [12 on GSM8K]
    temperature=0.3,  # [.9 on GSM8K]
    segments=16,  # N [8 on GSM8K]
    # sudoku_d2stepmerge_N16.sh [256 tokens and 128 steps on GSM8K]
    scale=dict(learning_rate=3e-06, num_generations=6, **canvas(tokens=128, steps=64, block=32)),
    page=Page(
        paper="[2509.21474](https://arxiv.org/abs/2509.21474)",
        scores="replay, 16 segments; token ratio; k3",
        release="kuleshov-group/d2@381b9f1",
        largest_difference="5e-07",
        differs="a micro-batch scores all segments of its rows",
    ),
)
