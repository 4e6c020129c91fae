"""SPG's block-wise masks (arXiv 2510.09541, section 3 and appendix).

A view draws a block of those that reach into the completion. Blocks before it are clean, of its own tokens a random
number is hidden, and all after it are hidden: states as the sampler meets them. Prompt and clean blocks are perturbed:
each of their tokens is hidden with probability `p_mask_prompt`. A view gives the mean over its hidden tokens, and the
views' mean is SPG's lower form; `d1/rl/objectives.py` makes both of its forms of the views' log-probs.

Neither form bounds a likelihood in general. With one block and nothing perturbed, the mean of the lower form over all
draws is the any-order bound (`d1/scoring/elbo.py`) divided by the length. With more blocks it is no bound: blocks are
averaged, and each view scores all later blocks, too. As in the released code a view's block is the place of a random
permutation of all blocks of the canvas, modulo the blocks that reach into the completion: a block can come twice, and
where their number does not divide the canvas' the first ones are likelier.
"""

from __future__ import annotations

import torch
from torch import Generator, Tensor

from d1.masking import draw_mask
from d1.scoring.rollouts import Randomness, SampledRows, ViewSettings, prompt_noise
from d1.scoring.views import Views, views_of_canvas


def spg_views(prompt_noise: Tensor, hidden: Tensor, scored: Tensor) -> Views:
    """Views that hide `hidden` (rows, views, canvas), each the mean of its hidden tokens, over the number of views."""
    counts = (hidden & scored.unsqueeze(1)).sum(-1, keepdim=True).clamp(min=1)
    return views_of_canvas(prompt_noise, hidden, scored, 1 / (hidden.shape[1] * counts))


def hidden_of_row(length: int, block: int, hide: int, order: Tensor, block_length: int, perturbed: Tensor) -> Tensor:
    """(canvas,) bool, what a view hides of one row.

    Args:
        length: scored tokens.
        block: the drawn block.
        hide: how many of the block's scored tokens are hidden, the first of `order`, a permutation of them.
        perturbed: (canvas,) bool, the tokens hidden of earlier blocks.
    """
    first, end = block * block_length, min((block + 1) * block_length, length)
    hidden = torch.ones_like(perturbed)
    hidden[:first] = perturbed[:first]
    hidden[first:end] = False
    hidden[first + order[:hide]] = True
    return hidden


def draw_row(scored: Tensor, generator: Generator, count: int, settings: ViewSettings) -> Tensor:
    """(views, canvas) bool of one row, in `count` views."""
    length, size = int(scored.sum()), settings.block_length
    if not length:  # a row that takes no part
        return torch.ones(count, len(scored), dtype=torch.bool)
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
