"""JustGRPO (arXiv 2601.15165): completions are sampled and scored from left to right, by the exact chain rule.

    loss = -min(rho A, clip(rho) A) per token / (G x number of rows with A other than 0)

Release: LeapLabTHU/JustGRPO@eebe50e: train.py, grpo.py. Differs: the mean, not the sum, over accumulated micro-batches;
rows with A = 0 are counted over the rollout.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from d1.rl.methods.entry import Page, Trained
from d1.rl.methods.shared import CONSTANT, method
from d1.scoring import Estimator
from d1.scoring.entry import draws_all, draws_some, never

if TYPE_CHECKING:
    from torch import Tensor

    from d1.scoring import Randomness, SampledRows, Views, ViewSettings


def draw_text(sampled: SampledRows, random: Randomness, settings: ViewSettings) -> Views:
    """The chain rule: each token is scored given the prompt and the tokens before it, with all later tokens hidden
    (JustGRPO, arXiv 2601.15165). One view per token; in a model with blocks, a view scores one token of every block.
    Exact for a sampler with `block_length` 1, or one that reveals from left to right.

    With `num_views` n, the n tokens of each block that were least likely in the rollout, with weight 1: biased by
    design (the fast variant of NVIDIA-NeMo/RL, research/just_grpo)."""
    import torch

    from d1.scoring.inputs import steps_in_blocks
    from d1.scoring.replay import WrittenTokens, all_segments, clean_prompt, last_scored_segment, replay_views

    rows, canvas = sampled.scored.shape
    order = torch.arange(canvas, device=sampled.scored.device).repeat(rows, 1)
    steps = steps_in_blocks(order, sampled.blocks)
    if settings.num_views:
        return least_likely(sampled, steps, settings.num_views)
    written = WrittenTokens(steps.unsqueeze(-1), sampled.scored.unsqueeze(-1), sampled.entropies.unsqueeze(-1))
    last = int(last_scored_segment(steps, sampled.scored).max())
    return replay_views(clean_prompt(sampled), written, *all_segments(last, written.steps))


def least_likely(sampled: SampledRows, steps: Tensor, count: int) -> Views:
    """`count` views. View v scores, in each block, the v-th from the left of its `count` least likely scored tokens (in
    a tie, the first ones) and hides this token and all after it in the block; `steps` (rows, canvas) number its tokens.
    """
    import torch

    from d1.scoring import Views
    from d1.scoring.inputs import ranks_in_blocks
    from d1.scoring.replay import clean_prompt

    scored, blocks = sampled.scored, sampled.block_numbers
    logps = sampled.logps.masked_fill(~scored, torch.inf)
    chosen = scored & (ranks_in_blocks(logps.unsqueeze(1), blocks).squeeze(1) < count)
    first_of_block = torch.arange(steps.shape[1], device=steps.device) - steps
    before = chosen.cumsum(1) - chosen.long()
    number = before - before.gather(1, first_of_block)  # among the block's chosen tokens, from the left
    # (rows, views, canvas): whether a view scores a token, and the number in its block of the one that it scores there.
    asked = chosen.unsqueeze(1) & (number.unsqueeze(1) == torch.arange(count, device=steps.device)[:, None])
    firsts = steps.new_full((len(steps), count, steps.shape[1]), steps.shape[1])
    expanded = blocks.unsqueeze(1).expand_as(firsts)
    firsts = firsts.scatter_reduce(2, expanded, torch.where(asked, steps.unsqueeze(1), firsts), "amin").gather(
        2, expanded
    )
    prompt = clean_prompt(sampled).expand(-1, count, -1)
    return Views(torch.cat([prompt, steps.unsqueeze(1) >= firsts], dim=-1), asked.float())


# The chain rule is also that of the two methods for models with blocks. With blocks of one token, the sampler goes from
# left to right, too: its record has the log-probabilities.
ESTIMATORS = {
    "left_to_right": Estimator(
        draw_text,
        lambda settings: min(settings.num_views or settings.gen_length, settings.gen_length),
        draws=never,
        clean_prompt=True,
        partial=draws_some,
        covers=draws_all,
        reads=lambda settings: ("logps",) if settings.num_views is not None else (),
        as_sampled=lambda settings: settings.block_length == 1,
        causal_first=True,
        settings=("num_views",),
    ),
}


METHOD = method(
    "JustGRPO, arXiv 2601.15165",
    trained=Trained(64),
    estimator="left_to_right",  # grpo.py: one view per token of the canvas, the chain rule
    p_mask_prompt=0.0,
    scored_tokens="canvas",
    objective="clipped_views",
    loss_type="active",  # gain / gen_length / (valid_samples + 1e-5): by G and the rows with A other than 0
    epsilon=0.2,  # eps
    beta=0.0,
    scale_rewards="group",  # z
    num_iterations=1,
    temperature=1.0,
    max_grad_norm=1.0,
    block_length=1,
    diffusion_steps=None,  # one per token
    scale=dict(learning_rate=5e-06, num_generations=16, **CONSTANT),  # 8 x repeat_times 2
    page=Page(
        paper="[2601.15165](https://arxiv.org/abs/2601.15165)",
        scores="left to right (exact chain rule); token ratio",
        release="LeapLabTHU/JustGRPO@eebe50e",
        largest_difference="2e-06",
        differs="mean over accumulation; rows with A = 0 counted over the rollout",
    ),
)
