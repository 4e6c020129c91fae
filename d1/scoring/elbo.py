"""Monte Carlo estimates of the any-order evidence lower bound of log p, with random masks.

For a completion of L tokens, the bound is the sum over x = 1..L of E[sum of the hidden tokens' log-probs] / x, where
the expectation is over the sets of x hidden tokens (LLaDA, arXiv 2502.09992, equation 14, and appendix B.5). The
estimators are unbiased for it; they differ in how a draw chooses the hidden tokens:

- `elbo`: a uniform time t, then each token is hidden with probability t; weight 1 / t (LLaDA's training loss);
- `espo`: a count x, uniform on 0..L, then a random set of x tokens; weight (L + 1) / x (ESPO, arXiv 2512.03759);
- `counts`: a count x, uniform on 1..L, then a random set of x tokens; weight L / x (BGPO, arXiv 2510.11683). In a
  block-causal model, the bound is the sum of the bounds of its blocks, and each block has its own count (EBPO).

`antithetic` adds to each draw its opposite, which hides the other tokens; `stratified` spreads times or counts evenly
over the draws of a row and over all rows of the rollout.
"""

from __future__ import annotations

import torch
from torch import Tensor

from d1.scoring.inputs import Randomness, SampledRows, ViewSettings, draw_hidden_prompt, ranks_in_blocks
from d1.scoring.views import Views, views_of_canvas

# Shapes: times and counts (rows, draws); numbers and ranks of tokens, and what a draw hides, (rows, draws, canvas);
# the hidden prompt (rows, views or 1, prompt). A draw gives one view or, if antithetic, two.


def weighted_views(
    hidden_prompt: Tensor, hidden: Tensor, scored: Tensor, weights: Tensor, opposite: Tensor, antithetic: bool
) -> Views:
    """Views of the draws; with `antithetic`, also views that hide the other tokens, with the weights `opposite`."""
    if antithetic:
        hidden = torch.cat([hidden, ~hidden], dim=1)
        weights = torch.cat([weights, opposite], dim=1) / 2
    return views_of_canvas(hidden_prompt, hidden, scored, weights.unsqueeze(-1))


def elbo_views(hidden_prompt: Tensor, times: Tensor, numbers: Tensor, scored: Tensor, antithetic: bool) -> Views:
    """A view for each time (rows, draws); it hides the tokens whose number (rows, draws, canvas) is below the time."""
    draws = times.shape[1]
    hidden = numbers < times.unsqueeze(-1)
    weights = 1 / (draws * times)
    # The opposite view is that of time 1 - t and the numbers 1 - u, so its weight is 1 / (1 - t).
    opposite = 1 / (draws * (1 - times))
    return weighted_views(hidden_prompt, hidden, scored, weights, opposite, antithetic)


def espo_views(hidden_prompt: Tensor, counts: Tensor, ranks: Tensor, scored: Tensor, antithetic: bool) -> Views:
    """A view for each count (rows, draws); it hides the scored tokens whose rank (rows, draws, canvas) is below it."""
    draws, lengths = counts.shape[1], scored.sum(-1, keepdim=True)
    hidden = ranks < counts.unsqueeze(-1)
    weights = (lengths + 1) / (draws * counts.clamp(min=1))
    opposite = (lengths + 1) / (draws * (lengths - counts).clamp(min=1))
    return weighted_views(hidden_prompt, hidden, scored, weights, opposite, antithetic)


def draw_uniform(random: Randomness, settings: ViewSettings) -> Tensor:
    """(rows, draws) uniform numbers in [0, 1), from which times or counts are made."""
    if settings.stratified:
        return random.rotated(settings.draws)
    return random.uniform(settings.draws)


def numbers_of_tokens(sampled: SampledRows, random: Randomness, draws: int) -> Tensor:
    """(rows, draws, canvas) in [0, 1), independent for each scored token; others have 1 and use no random number."""
    scored = sampled.scored.cpu()
    numbers = torch.ones(len(scored), draws, scored.shape[1])
    for row, scored_of_row, generator in zip(numbers, scored, random.generators, strict=True):
        row[:, scored_of_row] = torch.rand(draws, int(scored_of_row.sum()), generator=generator)
    return numbers.to(sampled.scored.device)


def ranks_of_tokens(sampled: SampledRows, random: Randomness, draws: int) -> Tensor:
    """(rows, draws, canvas) ranks: first those of the scored tokens, from 0 in random order, then those of others."""
    # Numbers of 24 bits can be equal: a stable sort gives such tokens the same ranks on every device.
    return numbers_of_tokens(sampled, random, draws).argsort(dim=-1, stable=True).argsort(-1)


def draw(sampled: SampledRows, random: Randomness, settings: ViewSettings) -> Views:
    device = sampled.scored.device
    # Neither 1 / t nor 1 / (1 - t) is infinite.
    times = draw_uniform(random, settings).clamp(2**-24, 1 - 2**-24).to(device)
    numbers = numbers_of_tokens(sampled, random, settings.draws)
    hidden_prompt = draw_hidden_prompt(sampled, random, settings.p_mask_prompt, settings.paired_draws)
    return elbo_views(hidden_prompt, times, numbers, sampled.scored, settings.antithetic)


def uniform_counts(sampled: SampledRows, random: Randomness, settings: ViewSettings) -> Tensor:
    """(rows, draws) counts, uniform on 0..L."""
    lengths = sampled.scored.sum(-1, keepdim=True)
    return (draw_uniform(random, settings).to(lengths.device) * (lengths + 1)).long().minimum(lengths)


def draw_espo(sampled: SampledRows, random: Randomness, settings: ViewSettings) -> Views:
    counts = uniform_counts(sampled, random, settings)
    ranks = ranks_of_tokens(sampled, random, settings.draws)
    hidden_prompt = draw_hidden_prompt(sampled, random, settings.p_mask_prompt, settings.paired_draws)
    return espo_views(hidden_prompt, counts, ranks, sampled.scored, settings.antithetic)


def draw_counts(sampled: SampledRows, random: Randomness, settings: ViewSettings) -> Views:
    """With blocks, one random number per draw sets the counts of all blocks, each scaled to 1..length of its block.
    If stratified, it is shifted from block to block: evenly over all draws and scored blocks of a row."""
    scored, blocks = sampled.scored, sampled.block_numbers

    # The scored tokens of each token's own block, (rows, canvas), and the number of blocks with any, (rows, 1).
    per_block = torch.zeros_like(blocks).scatter_add(1, blocks, scored.long())
    lengths = per_block.gather(1, blocks)
    scored_blocks = (per_block > 0).sum(1, keepdim=True).clamp(min=1)

    # The count of each token's block, and each token's rank in it, (rows, draws, canvas).
    shift = blocks * settings.stratified / (scored_blocks * settings.draws)
    uniform = draw_uniform(random, settings).to(scored.device).unsqueeze(-1)
    uniform = (uniform + shift.unsqueeze(1)) % 1
    counts = ((uniform * lengths.unsqueeze(1)).long() + 1).minimum(lengths.unsqueeze(1))
    ranks = ranks_in_blocks(numbers_of_tokens(sampled, random, settings.draws), blocks)
    hidden_prompt = draw_hidden_prompt(sampled, random, settings.p_mask_prompt, settings.draws)
    weights = lengths.unsqueeze(1) / (settings.draws * counts.clamp(min=1))
    return views_of_canvas(hidden_prompt, ranks < counts, scored, weights)
