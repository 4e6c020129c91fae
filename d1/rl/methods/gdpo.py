"""GDPO (arXiv 2510.08554): GRPO with one ratio per completion, of bounds by quadrature.

    rho = exp((B - old) / G); B: Gauss-Legendre quadrature of the any-order bound at three shares t of hidden tokens

Release: KevinRojas1499/GDPO: gdpo_trainer.py, likelihood_estimators.py. The values are those of the port by one of its
authors, NVIDIA-NeMo/RL, pull request 3550, research/gdpo/configs/gdpo_llada_8b.yaml, which scores up to the EOS, but
for the temperature, .9 in the release and 1.0 in the port. The release trains LoRA 128 on 4 bits with 2 x 6. In it, old
log-probs are scored under other masks than new ones, so that a ratio has noise even before the first update. Here new
and old share the masks, and the first ratio is 1.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from d1.rl.methods.entry import Page, Trained
from d1.rl.methods.shared import method
from d1.scoring import Estimator

if TYPE_CHECKING:
    from torch import Tensor

    from d1.scoring import Randomness, SampledRows, Views, ViewSettings

# The estimator: a view hides max(1, floor(t L)) tokens and has the weight w / t. Biased for short completions, where
# t L is far from a whole number: the weights of a token sum to 1.10 on average at L = 5 and to .96 at L = 20.

NODES = 3  # the shares t


def quadrature() -> tuple[Tensor, Tensor]:
    """The nodes t and the weights w of Gauss-Legendre quadrature on [0, 1], fp64."""
    import numpy as np
    import torch

    nodes, parts = (torch.tensor(values / 2, dtype=torch.float64) for values in np.polynomial.legendre.leggauss(NODES))
    return nodes + 0.5, parts  # from [-1, 1] to [0, 1]


def draw_gauss(sampled: SampledRows, random: Randomness, settings: ViewSettings) -> Views:
    from d1.scoring.elbo import ranks_of_tokens
    from d1.scoring.inputs import draw_hidden_prompt
    from d1.scoring.views import views_of_canvas

    scored, device = sampled.scored, sampled.scored.device
    nodes, parts = quadrature()
    times = nodes.to(device)
    counts = (times * scored.sum(-1, keepdim=True)).long().clamp(min=1)
    hidden = ranks_of_tokens(sampled, random, len(times)) < counts.unsqueeze(-1)
    hidden_prompt = draw_hidden_prompt(sampled, random, settings.p_mask_prompt, len(times))
    weights = (parts.to(device) / times).float().expand(len(scored), -1).unsqueeze(-1)
    return views_of_canvas(hidden_prompt, hidden, scored, weights)


ESTIMATORS = {"gauss": Estimator(draw_gauss, lambda settings: NODES, settings=())}


METHOD = method(
    "GDPO, arXiv 2510.08554",
    trained=Trained(32, lora_r=128),  # num_prompts_per_step
    estimator="gauss",  # gauss-3: floor(t G) hidden tokens (here at least one), weight w / t
    p_mask_prompt=0.0,
    scored_tokens="canvas",
    loss_type="grpo",
    importance_sampling_level="sequence",  # exp((ELBO - old) / G); ratio_clip_min and _max .5 and mu 12 are d1's
    beta=0.0,
    scale=dict(learning_rate=3e-07, num_generations=6),
    page=Page(
        paper="[2510.08554](https://arxiv.org/abs/2510.08554)",
        scores="ELBO by quadrature; sequence ratio",
        release="KevinRojas1499/GDPO, NeMo-RL's PR 3550",
        largest_difference="2e-07",
        differs=(
            "a view hides at least one token; new and old scores share their masks (release: the old ones differ, "
            "which adds noise to the ratio); temperature of the release, the rest of the port"
        ),
    ),
)
