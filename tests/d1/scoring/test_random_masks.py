"""UniGRPO's estimator, compared with its own definition integrated over all shares and masks."""

from dataclasses import replace

import pytest
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


def chance(hidden, length):
    """The probability of a set with this number of hidden tokens: the mean over shares s, uniform on [.1, .9], of
    s^hidden (1 - s)^shown."""
    return sum(p / 0.8 * s**hidden * (1 - s) ** (length - hidden) for s, p in quadrature(0.1, 0.9))


def all_draws(row):
    length = LENGTHS[row]
    sets = subsets(range(length))
    hidden = torch.stack([marked(some) for some in sets]).unsqueeze(1)
    noise = torch.zeros(len(sets), 1, PROMPT, dtype=torch.bool)
    views = random_mask_views(noise, hidden, SAMPLED.scored[row].expand(len(sets), -1))
    return torch.tensor([chance(len(some), length) for some in sets], dtype=torch.float64), views


def definition(model):
    """The sum over x = 1..L of L P(x) E[log p of hidden tokens] / x, over all sets of x; if P(x) is 1 / L, this is the
    any-order bound."""
    rows = []
    for row, length in enumerate(LENGTHS):
        total = torch.zeros(CANVAS, dtype=torch.float64)
        for some, logps in all_states(model, row).items():
            if some:
                total = total + length * chance(len(some), length) * marked(some) * logps / len(some)
        rows.append(total)
    return torch.stack(rows)


def test_the_mean_over_all_draws_is_the_definition_and_biased_for_the_any_order_bound():
    """Few masks hide almost no or almost all tokens, and masks that hide none score nothing."""
    views = stacked([merged(*all_draws(row)) for row in range(len(LENGTHS))])
    for model in every_model():
        found = scores(model, views).logps
        assert_same(model, found, definition(model))
        assert (found.sum(1) - any_order_bound(model).sum(1))[:2].abs().min() > 0.1
    for row, length in enumerate(LENGTHS[:3]):  # L (1 - P(0)); the bound's weights sum to L
        nothing = (0.9 ** (length + 1) - 0.1 ** (length + 1)) / (0.8 * (length + 1))
        assert float(views.weights[row].sum()) == pytest.approx(length * (1 - nothing), abs=1e-6)


def draw(views, **changes):
    sampled = replace(repeated(0, 1), **changes)
    random = Randomness([keyed_generator(3)], keyed_generator(0), 0, 1)
    drawn = ESTIMATORS["random_masks"](sampled, random, settings(p_mask_prompt=0.5, num_views=views))
    return drawn.noise[0], drawn.weights[0]


def test_draws_have_the_chances_assumed_there_and_weigh_to_the_length():
    count = 3000
    noise, weights = draw(count, scored=torch.tensor([[True] * 3 + [False]]))
    assert noise[:, -1].all()  # behind the end
    hidden = noise[:, PROMPT:-1]
    sets = (hidden * 2 ** torch.arange(3)).sum(-1)
    chances = [chance(bin(some).count("1"), 3) for some in range(8)]
    assert_frequencies(sets.bincount(minlength=8), torch.tensor(chances))
    torch.testing.assert_close(weights.sum(-1) * count, torch.where(sets > 0, 3.0, 0.0))
    assert torch.equal(weights > 0, torch.cat([hidden, torch.zeros(count, 1, dtype=torch.bool)], dim=1))
    prompts = (noise[:, :PROMPT] * torch.tensor([0, 1, 2])).sum(-1)
    assert_frequencies(prompts.bincount(minlength=4), torch.full((4,), 0.25))


def test_the_shares_of_a_rows_views_are_uniform_between_a_tenth_and_nine_tenths():
    long = torch.ones(1, 2000, dtype=torch.long)
    noise, _ = draw(800, canvas_ids=long, scored=long.bool())
    shares = noise[:, PROMPT:].float().mean(-1)
    assert 0.07 < shares.min() < 0.13
    assert 0.87 < shares.max() < 0.93
    assert_frequencies(((shares - 0.1) * 10).long().clamp(0, 7).bincount(), torch.full((8,), 1 / 8))
