"""SPG (arXiv 2510.09541): the policy gradient of a lower bound where A > 0, and of a mixture with an upper one
elsewhere.

    loss = -A x bound x L / (sum of L)

Release: facebookresearch/SPG@a1c7120 spg: slurm_scripts/spg_mix/gsm_base_spg_mix_beta1.5_weight0.5.sbatch,
spg_trainer.py. Differs: divided by the tokens of the rollout, not of the micro-batch.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

from d1.rl.losses import ROW_MEANS, Objective, reduce_loss
from d1.rl.methods.d1 import D1_TRAINED
from d1.rl.methods.entry import Page
from d1.rl.methods.shared import method
from d1.scoring import Estimator
from d1.scoring.entry import one_per_draw

if TYPE_CHECKING:
    from torch import Generator, Tensor

    from d1.rl.losses import Loss, LossInputs
    from d1.scoring import Randomness, SampledRows, Views, ViewSettings

# --- The estimator: block-wise masks, section 3 and appendix ----------------------------------------------------------
#
# A view draws one of the blocks that overlap the completion. Blocks before it are clean, a random number of the block's
# tokens is hidden, and all blocks after it are hidden: states like those of the sampler. Prompt and clean blocks are
# perturbed: each of their tokens is hidden with probability `p_mask_prompt`. A view gives the mean over its hidden
# tokens, and the mean of the views is SPG's lower form; `evidence_bounds` makes both forms of SPG from the log-probs
# of the views.
#
# Neither form bounds a likelihood in general. With one block and nothing perturbed, the mean of the lower form over
# all draws is the any-order bound (`d1/scoring/elbo.py`) divided by the length. With more blocks it is not a bound:
# blocks are averaged, and each view also scores all later blocks. As in the released code, the block of a view is an
# entry of a random permutation of all blocks of the canvas, modulo the number of blocks that overlap the completion:
# a block can come twice, and if this number does not divide the number of blocks of the canvas, the first blocks are
# more likely.


def spg_views(hidden_prompt: Tensor, hidden: Tensor, scored: Tensor) -> Views:
    """Views that hide `hidden` (rows, views, canvas); each is the mean over its hidden tokens, divided by the number of
    views."""
    from d1.scoring.views import views_of_canvas

    counts = (hidden & scored.unsqueeze(1)).sum(-1, keepdim=True).clamp(min=1)
    return views_of_canvas(hidden_prompt, hidden, scored, 1 / (hidden.shape[1] * counts))


def hidden_of_row(length: int, block: int, hide: int, order: Tensor, block_length: int, perturbed: Tensor) -> Tensor:
    """(canvas,) bool, what a view hides of one row with `length` scored tokens: those `perturbed` of the blocks before
    the drawn one, the first `hide` of its tokens in the order `order`, and all later blocks."""
    import torch

    first, end = block * block_length, min((block + 1) * block_length, length)
    hidden = torch.ones_like(perturbed)
    hidden[:first] = perturbed[:first]
    hidden[first:end] = False
    hidden[first + order[:hide]] = True
    return hidden


def draw_row(scored: Tensor, generator: Generator, count: int, settings: ViewSettings) -> Tensor:
    """(views, canvas) bool, what each of `count` views hides of one row."""
    import torch

    from d1.masking import draw_mask

    length, size = int(scored.sum()), settings.block_length
    if not length:  # a row without scored tokens
        return torch.ones(count, len(scored), dtype=torch.bool)
    # Blocks of the canvas in random order, modulo those of the completion; used again if there are more views.
    order = torch.randperm(-(-len(scored) // size), generator=generator) % -(-length // size)
    rows = []
    for block in order.repeat(-(-count // len(order)))[:count].tolist():
        tokens = min((block + 1) * size, length) - block * size
        hide = int(torch.randint(1, tokens + 1, (), generator=generator))
        which = torch.randperm(tokens, generator=generator)
        perturbed = draw_mask(torch.ones(len(scored), dtype=torch.bool), settings.p_mask_prompt, generator)
        rows.append(hidden_of_row(length, block, hide, which, size, perturbed))
    return torch.stack(rows)


def draw_blocks(sampled: SampledRows, random: Randomness, settings: ViewSettings) -> Views:
    import torch

    from d1.scoring.inputs import draw_hidden_prompt

    count = settings.draws
    rows = zip(sampled.scored.cpu(), random.generators, strict=True)
    hidden = torch.stack([draw_row(scored, generator, count, settings) for scored, generator in rows])
    hidden_prompt = draw_hidden_prompt(sampled, random, settings.p_mask_prompt, count)
    return spg_views(hidden_prompt, hidden.to(sampled.scored.device), sampled.scored)


# --- The objective ----------------------------------------------------------------------------------------------------


def evidence_bounds(inputs: LossInputs, eubo_beta: float) -> tuple[Tensor, Tensor]:
    """SPG's two estimates of the log-probability per token, (rows,) each (arXiv 2510.09541, section 3).

    The first is the weighted sum over views. The second, with beta = `eubo_beta` and t_v the share of a row's
    tokens that view v hides, is the mean over hidden tokens k of 1/beta log(mean over v of p_k(v)^beta [hidden] / t_v).

    With masks of a single block, the mean of the first over draws is a lower bound. The second is an upper bound only
    for beta >= the completion's length and many draws. With several blocks neither is a bound.
    """
    import torch

    hidden_RVT = inputs.weights != 0
    shares_RV = hidden_RVT.sum(-1) / inputs.lengths.unsqueeze(1)  # t_v
    # log(p^beta / t_v); 1e-12 only where a view hides nothing, which is left out below
    powers_RVT = eubo_beta * inputs.view_logps - shares_RV.clamp(min=1e-12).log().unsqueeze(-1)
    met_RT = hidden_RVT.any(1)
    # A token that no view hides gets zeros: the logsumexp of -inf alone has a gradient of NaN.
    joined_RVT = torch.where(hidden_RVT, powers_RVT, -torch.inf).masked_fill(~met_RT.unsqueeze(1), 0.0)
    joined_RT = (joined_RVT.logsumexp(1) - math.log(hidden_RVT.shape[1])) / eubo_beta
    upper = joined_RT.masked_fill(~met_RT, 0.0).sum(-1) / met_RT.sum(-1).clamp(min=1)
    return inputs.logps.sum(-1), upper


def sandwiched(inputs: LossInputs, settings: Any) -> Tensor:
    """(rows,) SPG's bound: the lower one if A > 0, else a mixture with share `settings.eubo_share` of the upper one."""
    import torch

    lower, upper = evidence_bounds(inputs, settings.eubo_beta)
    mixed = settings.eubo_share * upper + (1 - settings.eubo_share) * lower
    return torch.where(inputs.advantages > 0, lower, mixed)


def spg(inputs: LossInputs, settings: Any) -> Loss:
    """-A x bound, each row weighted by its length (SPG, arXiv 2510.09541, section 3)."""
    per_row = -inputs.advantages * sandwiched(inputs, settings) * inputs.lengths
    return reduce_loss(per_row.unsqueeze(1), inputs, settings), {}


# The estimator and the settings of the bounds are StableDRL's, too.
BOUND = ("eubo_beta", "eubo_share")
ESTIMATORS = {
    "spg": Estimator(draw_blocks, one_per_draw, linear=False, contiguous=True, settings=("num_views",)),
}
OBJECTIVES = {
    "spg": Objective(
        spg,
        reads_old=False,
        per_view=True,
        per_row=True,
        linear=False,
        loss_types=ROW_MEANS,
        settings=("loss_type", *BOUND),
    ),
}


METHOD = method(
    "SPG, arXiv 2510.09541",
    trained=D1_TRAINED,
    estimator="spg",  # forward_type block_random; prompt masks are d1's
    objective="spg",  # section 3: the lower form for A > 0, else a mixture of both
    loss_type="dapo",  # -A x bound x L / (sum of L); no clip, so epsilon is not read
    beta=0.0,
    num_iterations=4,  # NUM_ITER
    num_views=2,  # num_t
    eubo_beta=1.5,  # [1.0 on Sudoku]
    eubo_share=0.5,  # mix_weight; the temperature is d1's [.3 on Sudoku]
    scale=dict(learning_rate=3e-06, num_generations=6),
    page=Page(
        paper="[2510.09541](https://arxiv.org/abs/2510.09541)",
        scores="masks by blocks; bounds from both sides",
        release="facebookresearch/SPG@a1c7120",
        largest_difference="5e-07",
        differs="divided by the rollout's tokens",
    ),
)
