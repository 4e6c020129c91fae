"""coupled-GRPO, of DiffuCoder (arXiv 2506.20639): d1's estimate averaged with that of two complementary masks.

Release: apple/ml-diffucoder@f735e01: recipes/config_coupled_code.yaml, src/open_r1/coupled_grpo.py.
Differs: tokens after the EOS are hidden. The reference is not updated: sync_ref_model with 64 steps and .6 does it.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from d1.rl.methods.entry import Page, Trained
from d1.rl.methods.shared import canvas, method
from d1.scoring import Estimator
from d1.scoring.entry import always

if TYPE_CHECKING:
    from torch import Tensor

    from d1.scoring import Randomness, SampledRows, Views, ViewSettings

# The estimator, section 4: the mean of d1's estimate and of the estimate from two complementary masks. Biased by
# design: the masking probability is between 0.2 and 0.8, and, as in the released code, the expected weights sum to
# 1.5: 0.5 from the fully masked view and 0.5 from each of two complementary masks.

SHARES = (0.2, 0.8)  # the masking probability is uniform between these


def coupled_views(hidden_prompt: Tensor, half: Tensor, share: Tensor, scored: Tensor) -> Views:
    """Three views: the first hides all tokens, the second those of `half` (rows, canvas), the third the others. A token
    is in `half` with probability `share` (rows,); `hidden_prompt` (rows, 1, prompt) is hidden in all three."""
    import torch

    from d1.scoring.views import views_of_canvas

    # A mask's weight is 0.5 / P(it hides the token), so its expected value is 0.5, as that of the first view.
    hidden = torch.stack([torch.ones_like(half), half, ~half], dim=1)
    weights = torch.stack([torch.full_like(share, 0.5), 0.5 / share, 0.5 / (1 - share)], dim=1).unsqueeze(-1)
    return views_of_canvas(hidden_prompt, hidden, scored, weights)


def draw_coupled(sampled: SampledRows, random: Randomness, settings: ViewSettings) -> Views:
    from d1.masking import draw_masks
    from d1.scoring.inputs import draw_hidden_prompt

    low, high = SHARES
    share = (low + (high - low) * random.uniform(1)[:, 0]).to(sampled.scored.device)
    half = draw_masks(sampled.scored, share, random.generators)
    hidden_prompt = draw_hidden_prompt(sampled, random, settings.p_mask_prompt, 1)
    return coupled_views(hidden_prompt, half, share, sampled.scored)


ESTIMATORS = {"coupled": Estimator(draw_coupled, lambda settings: 3, covers=always, settings=())}


METHOD = method(
    "DiffuCoder, arXiv 2506.20639",
    trained=Trained(8),  # 8 GPUs x 5 x accumulation 2, groups of 10
    estimator="coupled",  # all hidden; each token hidden with rho in [.2, .8], per row; its complement
    p_mask_prompt=0.0,
    beta=0.01,
    advantage="leave_one_out",
    num_iterations=2,
    temperature=1.0,  # generation_temperature
    top_p=0.95,  # sampling only
    remasking="entropy",  # tokens of lowest entropy first
    scale=dict(
        learning_rate=1e-06,
        num_generations=10,
        lr_scheduler_type="cosine_with_min_lr",
        lr_scheduler_kwargs={"min_lr_rate": 0.1},
        **canvas(tokens=256, steps=256, block=256),  # one block
    ),
    page=Page(
        paper="[2506.20639](https://arxiv.org/abs/2506.20639)",
        scores="all hidden, two opposite masks; token ratio; k3",
        release="apple/ml-diffucoder@f735e01",
        largest_difference="1e-06",
        differs=(
            "rho per row; tokens after the EOS hidden; entropies of the order without top-p; fixed reference (full "
            "fine-tuning: add `--sync_ref_model true --ref_model_sync_steps 64 --ref_model_mixup_alpha .6`)"
        ),
    ),
)
