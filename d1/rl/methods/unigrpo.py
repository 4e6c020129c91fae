"""UniGRPO, of MMaDA (arXiv 2505.15809): TraceRL's loss with random masks instead of the sampler's states.

Release: Gen-Verse/dLLM-RL@10b4fd1 with method random_masking, which MMaDA names as the implementation. The rest is as
in tracerl.py.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from d1.rl.methods.entry import Page, Trained
from d1.rl.methods.shared import canvas, method
from d1.rl.methods.tracerl import RIGHT_SHARE, TRACERL, TRACERL_SCALE
from d1.scoring import Estimator
from d1.scoring.entry import always, one_per_draw

if TYPE_CHECKING:
    from torch import Tensor

    from d1.scoring import Randomness, SampledRows, Views, ViewSettings

# The estimator: `num_views` masks, each of which hides tokens with a probability uniform on [0.1, 0.9]; the mean
# log-probability of the tokens that a mask hides, times the completion's length. Biased for the any-order bound
# (`d1/scoring/elbo.py`), which needs probabilities from 0 to 1.

TIMES = (0.1, 0.9)


def random_mask_views(hidden_prompt: Tensor, hidden: Tensor, scored: Tensor) -> Views:
    """Views that hide `hidden` (rows, views, canvas) and `hidden_prompt` (rows, views or 1, prompt); the weights of
    each view sum to the completion's length divided by the number of views."""
    from d1.scoring.views import views_of_canvas

    count = (hidden & scored.unsqueeze(1)).sum(-1, keepdim=True).clamp(min=1)
    weights = scored.sum(-1)[:, None, None] / (hidden.shape[1] * count)
    return views_of_canvas(hidden_prompt, hidden, scored, weights)


def draw_random(sampled: SampledRows, random: Randomness, settings: ViewSettings) -> Views:
    import torch

    from d1.masking import draw_masks
    from d1.scoring.inputs import draw_hidden_prompt

    low, high = TIMES
    times = low + (high - low) * random.uniform(settings.draws)
    hidden = torch.stack([draw_masks(sampled.scored, of_view, random.generators) for of_view in times.unbind(1)], dim=1)
    hidden_prompt = draw_hidden_prompt(sampled, random, settings.p_mask_prompt, settings.draws)
    return random_mask_views(hidden_prompt, hidden, sampled.scored)


ESTIMATORS = {
    "random_masks": Estimator(draw_random, one_per_draw, partial=always, settings=("num_views",)),
}


METHOD = method(
    "UniGRPO, of MMaDA, arXiv 2505.15809",
    trained=Trained(256 / 35 / 8),  # 256 views per step, 35 per completion
    **TRACERL,
    estimator="random_masks",  # lower_p .1, upper_p .9: t uniform in (.1, .9) per view
    temperature=0.8,
    num_views=35,  # mask_times_per_sample
    right_share=RIGHT_SHARE,
    scale=dict(**TRACERL_SCALE, **canvas(tokens=512, steps=512, block=32)),
    page=Page(
        paper="[2505.15809](https://arxiv.org/abs/2505.15809)",
        scores="35 random masks; as tracerl",
        release="Gen-Verse/dLLM-RL@10b4fd1, random_masking",
        largest_difference="2e-07",
        differs="as `tracerl`",
    ),
)
