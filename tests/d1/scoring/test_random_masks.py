"""UniGRPO's estimator against its own definition, integrated over all shares and masks: nearly the any-order bound."""

from dataclasses import replace
from math import comb

import torch

from d1.masking import keyed_generator
from d1.scoring import ESTIMATORS, Randomness
from d1.scoring.masks import random_mask_views
from tests.d1.scoring.enumeration import (
    CANVAS,
    LENGTHS,
    PROMPT,
    SAMPLED,
    all_states,
    any_order_bound,
    assert_frequencies,
    assert_same,
    every_model,
    marked,
    merged,
    quadrature,
    repeated,
    scores,
    settings,
    stacked,
    subsets,
)


def all_draws(row):
    length = LENGTHS[row]
    sets = subsets(range(length))
    # A uniform share makes the count of hidden tokens uniform, too.
    chances = [sum(p * s ** len(h) * (1 - s) ** (length - len(h)) for s, p in quadrature()) for h in sets]
    hidden = torch.stack([marked(some) for some in sets])
    noise = torch.zeros(len(sets), 1, PROMPT, dtype=torch.bool)
    views = random_mask_views(noise, hidden, SAMPLED.scored[row].expand(len(sets), -1))
    return torch.tensor(chances, dtype=torch.float64), views


def definition(model):
    """L x the mean log-prob of hidden tokens, for a uniform count of 0..L of them: nothing where none is hidden."""
    rows = []
    for row, length in enumerate(LENGTHS):
        states = all_states(model, row)
        total = torch.zeros(CANVAS, dtype=torch.float64)
        for some in states:
            if some:
                total = total + marked(some) * states[some] * length / len(some) / (
                    (length + 1) * comb(length, len(some))
                )
        rows.append(total)
    return torch.stack(rows)


def test_the_mean_over_all_draws_is_the_definition_a_fixed_share_of_the_any_order_bound():
    """With shares uniform on [0, 1) the mean is L / (L + 1) of the bound: the mean over hidden tokens weighs a mask of
    x tokens by L / x, where ESPO's estimate without bias takes (L + 1) / x."""
    views = stacked([merged(*all_draws(row)) for row in range(len(LENGTHS))])
    lengths = torch.tensor(LENGTHS).unsqueeze(1)
    for model in every_model():
        found = scores(model, views).logps
        assert_same(model, found, definition(model))
        assert_same(model, found, any_order_bound(model) * lengths / (lengths + 1))


def test_draws_hide_each_token_with_the_rows_share_and_weigh_to_the_length():
    count = 3000
    generator = keyed_generator(3)
    share = torch.tensor([0.3]).expand(count)
    random = Randomness([generator] * count, generator, 0, count, share)
    sampled = replace(repeated(0, count), scored=torch.tensor([[True] * 3 + [False]]).expand(count, -1))
    views = ESTIMATORS["random_masks"].draw(sampled, random, settings(p_mask_prompt=0.5))
    noise, weights = views.noise[:, 0], views.weights[:, 0]
    assert noise[:, -1].all()  # behind the end
    hidden = noise[:, PROMPT:-1]
    sets = (hidden * 2 ** torch.arange(3)).sum(-1)
    chances = [0.3**x * 0.7 ** (3 - x) for x in (bin(some).count("1") for some in range(8))]
    assert_frequencies(sets.bincount(minlength=8), torch.tensor(chances))
    torch.testing.assert_close(weights.sum(-1), torch.where(sets > 0, 3.0, 0.0))
    assert torch.equal(weights > 0, torch.cat([hidden, torch.zeros(count, 1, dtype=torch.bool)], dim=1))
    prompts = (noise[:, :PROMPT] * torch.tensor([0, 1, 2])).sum(-1)
    assert_frequencies(prompts.bincount(minlength=4), torch.full((4,), 0.25))
