"""Monte Carlo estimates of the any-order evidence lower bound of log p, with masks at random.

For a completion of L tokens the bound is the sum over x = 1..L of E[sum of hidden tokens' log-probs] / x, the
expectation over the sets of x hidden tokens (LLaDA, arXiv 2502.09992, equation 14, and appendix B.5). `elbo` and `espo`
estimate it without bias; they differ in how a draw chooses what is hidden:

- `elbo`: a time t, uniform, then each token with probability t, weight 1 / t (LLaDA's training loss);
- `espo`: a count x, uniform on 0..L, then a set of so many, weight (L + 1) / x (ESPO, arXiv 2512.03759).

`antithetic` adds to each draw its opposite, which hides the other tokens; `stratified` spreads times or counts evenly
over a row's draws and over all rows of the rollout.
"""

from __future__ import annotations

import torch
from torch import Tensor

from d1.scoring.rollouts import Randomness, SampledRows, ViewSettings, prompt_noise
from d1.scoring.views import Views, views_of_canvas


def weighed(
    prompt_noise: Tensor, hidden: Tensor, scored: Tensor, weights: Tensor, opposite: Tensor, antithetic: bool
) -> Views:
    """Views of draws; with `antithetic`, also those that hide the other tokens, with the weights `opposite`."""
    if antithetic:
        hidden, weights = torch.cat([hidden, ~hidden], dim=1), torch.cat([weights, opposite], dim=1) / 2
    return views_of_canvas(prompt_noise, hidden, scored, weights.unsqueeze(-1))


def elbo_views(prompt_noise: Tensor, times: Tensor, numbers: Tensor, scored: Tensor, antithetic: bool) -> Views:
    """A view for each time (rows, draws); it hides the tokens whose number (rows, draws, canvas) is below the time.

    Args:
        prompt_noise: (rows, views or 1, prompt) bool.
        antithetic: a second view for each time t, of 1 - t and 1 minus the numbers: it hides the other tokens.
    """
    draws, hidden = times.shape[1], numbers < times.unsqueeze(-1)
    return weighed(prompt_noise, hidden, scored, 1 / (draws * times), 1 / (draws * (1 - times)), antithetic)


def espo_views(prompt_noise: Tensor, counts: Tensor, ranks: Tensor, scored: Tensor, antithetic: bool) -> Views:
    """A view for each count (rows, draws); it hides the scored tokens whose rank (rows, draws, canvas) is below it.

    Args:
        prompt_noise: (rows, views or 1, prompt) bool.
        ranks: of scored tokens, 0..L-1 in random order.
        antithetic: a second view for each count, which hides the other tokens.
    """
    draws, lengths, hidden = counts.shape[1], scored.sum(-1, keepdim=True), ranks < counts.unsqueeze(-1)
    weights, opposite = ((lengths + 1) / (draws * count.clamp(min=1)) for count in (counts, lengths - counts))
    return weighed(prompt_noise, hidden, scored, weights, opposite, antithetic)


def views(settings: ViewSettings) -> int:
    return settings.draws * (2 if settings.antithetic else 1)


def spread(random: Randomness, settings: ViewSettings) -> Tensor:
    """(rows, draws) in [0, 1): what times or counts are made of."""
    draws = settings.draws
    return random.rotated(draws) if settings.stratified else random.uniform(draws)


def numbers_of_tokens(sampled: SampledRows, random: Randomness, draws: int) -> Tensor:
    """(rows, draws, canvas) in [0, 1), independent for each scored token; 1 for others, which take none of a stream."""
    scored = sampled.scored.cpu()
    numbers = torch.ones(len(scored), draws, scored.shape[1])
    for row, of, generator in zip(numbers, scored, random.rows, strict=True):
        row[:, of] = torch.rand(draws, int(of.sum()), generator=generator)
    return numbers.to(sampled.scored.device)


def draw(sampled: SampledRows, random: Randomness, settings: ViewSettings) -> Views:
    device = sampled.scored.device
    times = spread(random, settings).clamp(2**-24, 1 - 2**-24).to(device)  # neither 1 / t nor 1 / (1 - t) is infinite
    numbers = numbers_of_tokens(sampled, random, settings.draws)
    noise = prompt_noise(sampled, random, settings.p_mask_prompt, views(settings))
    return elbo_views(noise, times, numbers, sampled.scored, settings.antithetic)


def draw_counts(sampled: SampledRows, random: Randomness, settings: ViewSettings) -> Views:
    device, lengths = sampled.scored.device, sampled.scored.sum(-1, keepdim=True)
    counts = (spread(random, settings).to(device) * (lengths + 1)).long().minimum(lengths)
    # Numbers of 24 bits can be equal: a stable sort gives such tokens the same ranks on every device.
    ranks = numbers_of_tokens(sampled, random, settings.draws).argsort(dim=-1, stable=True).argsort(-1)
    noise = prompt_noise(sampled, random, settings.p_mask_prompt, views(settings))
    return espo_views(noise, counts, ranks, sampled.scored, settings.antithetic)
