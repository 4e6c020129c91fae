"""SPG's block-wise masks (arXiv 2510.09541, section 3 and appendix).

A view draws one of the blocks that overlap the completion. Blocks before it are clean, a random number of the block's
tokens is hidden, and all blocks after it are hidden: states like those of the sampler. Prompt and clean blocks are
perturbed: each of their tokens is hidden with probability `p_mask_prompt`. A view gives the mean over its hidden
tokens, and the mean of the views is SPG's lower form; `d1/rl/losses.py` makes both forms of SPG from the log-probs
of the views.

Neither form bounds a likelihood in general. With one block and nothing perturbed, the mean of the lower form over all
draws is the any-order bound (`d1/scoring/elbo.py`) divided by the length. With more blocks it is not a bound: blocks
are averaged, and each view also scores all later blocks. As in the released code, the block of a view is an entry of a
random permutation of all blocks of the canvas, modulo the number of blocks that overlap the completion: a block can
come twice, and if this number does not divide the number of blocks of the canvas, the first blocks are more likely.
"""

from __future__ import annotations

import torch
from torch import Generator, Tensor

from d1.masking import draw_mask
from d1.scoring.rollouts import Randomness, SampledRows, ViewSettings, prompt_noise
from d1.scoring.views import Views, views_of_canvas


def spg_views(prompt_noise: Tensor, hidden: Tensor, scored: Tensor) -> Views:
    """Views that hide `hidden` (rows, views, canvas); each is the mean over its hidden tokens, divided by the number of
    views."""
    counts = (hidden & scored.unsqueeze(1)).sum(-1, keepdim=True).clamp(min=1)
    return views_of_canvas(prompt_noise, hidden, scored, 1 / (hidden.shape[1] * counts))


def hidden_of_row(length: int, block: int, hide: int, order: Tensor, block_length: int, perturbed: Tensor) -> Tensor:
    """(canvas,) bool, what a view hides of one row with `length` scored tokens: those `perturbed` of the blocks before
    the drawn one, the first `hide` of its tokens in the order `order`, and all later blocks."""
    first, end = block * block_length, min((block + 1) * block_length, length)
    hidden = torch.ones_like(perturbed)
    hidden[:first] = perturbed[:first]
    hidden[first:end] = False
    hidden[first + order[:hide]] = True
    return hidden


def draw_row(scored: Tensor, generator: Generator, count: int, settings: ViewSettings) -> Tensor:
    """(views, canvas) bool, what each of `count` views hides of one row."""
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


def draw(sampled: SampledRows, random: Randomness, settings: ViewSettings) -> Views:
    count = settings.draws
    rows = zip(sampled.scored.cpu(), random.rows, strict=True)
    hidden = torch.stack([draw_row(scored, generator, count, settings) for scored, generator in rows])
    noise = prompt_noise(sampled, random, settings.p_mask_prompt, count)
    return spg_views(noise, hidden.to(sampled.scored.device), sampled.scored)
