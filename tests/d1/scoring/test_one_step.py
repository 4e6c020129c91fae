"""d1's, coupled-GRPO's and UniGRPO's estimators: their draws, and their means over all draws. None is the bound."""

from dataclasses import replace

import pytest
import torch

from d1.masking import draw_mask, keyed_generator
from d1.rl.methods.coupled_grpo import SHARES, coupled_views
from d1.rl.methods.unigrpo import random_mask_views
from d1.rl.tables import ESTIMATORS
from d1.scoring import Randomness
from d1.scoring.one_step import one_step_views
from tests.d1.scoring.enumeration import (
    CANVAS,
    LENGTHS,
    PROMPT,
    SAMPLED,
    any_order_bound,
    assert_frequencies,
    assert_same,
    assert_sets,
    every_model,
    marked,
    merged,
    of_row,
    quadrature,
    repeated,
    scores,
    settings,
    stacked,
    state_logps,
    subsets,
    sum_over_sets,
)
from tests.rounding import assert_near

P_MASK = 0.3


def one_step_draws(row):
    every = subsets(SAMPLED.maskable[row].nonzero().flatten().tolist())
    noise = torch.stack([marked(some, PROMPT) for some in every])
    chances = [P_MASK ** len(some) * (1 - P_MASK) ** (len(every[-1]) - len(some)) for some in every]
    return chances, one_step_views(noise, SAMPLED.scored[row].expand(len(every), -1), CANVAS)


def coupled_draws(row):
    length = LENGTHS[row]
    cases = [
        (share, marked(half), p / (SHARES[1] - SHARES[0]) * share ** len(half) * (1 - share) ** (length - len(half)))
        for share, p in quadrature(*SHARES)
        for half in subsets(range(length))
    ]
    shares, halves, chances = zip(*cases, strict=True)
    noise, scored = of_row(row, len(cases))
    return chances, coupled_views(noise, torch.stack(halves), torch.tensor(shares, dtype=torch.float64), scored)


def chance_of_mask(hidden, length):
    """The probability of a mask of UniGRPO with this number of hidden tokens: the mean over shares s, uniform on
    [.1, .9], of s^hidden (1 - s)^shown."""
    return sum(p / 0.8 * s**hidden * (1 - s) ** (length - hidden) for s, p in quadrature(0.1, 0.9))


def random_draws(row):
    sets = subsets(range(LENGTHS[row]))
    noise, scored = of_row(row, len(sets))
    hidden = torch.stack([marked(some) for some in sets]).unsqueeze(1)
    return [chance_of_mask(len(some), LENGTHS[row]) for some in sets], random_mask_views(noise, hidden, scored)


def one_step(model):
    """Each token revealed alone, averaged over all prompt masks."""
    rows = []
    for row, length in enumerate(LENGTHS):
        every = subsets(SAMPLED.maskable[row].nonzero().flatten().tolist())
        chances, _ = one_step_draws(row)
        each = [state_logps(model, row, range(CANVAS), prompt=some) for some in every]
        rows.append(sum(p * logps for p, logps in zip(chances, each, strict=True)) * marked(range(length)))
    return torch.stack(rows)


def coupled(model):
    """Half of one step's log-probs, plus half of those of two complementary masks. Each of these is, for a share s in
    (.2, .8), E[log p of hidden tokens] / s; both have the same distribution."""

    def weight(x, length):
        mean = sum(p / 0.6 * s ** (x - 1) * (1 - s) ** (length - x) for s, p in quadrature(0.2, 0.8, points=5))
        return mean + 0.5 * (x == length)

    return sum_over_sets(model, weight)


def random_masks(model):
    """The sum over x = 1..L of L P(x) E[log p of hidden tokens] / x, over all sets of x; if P(x) is 1 / L, this is the
    any-order bound."""
    return sum_over_sets(model, lambda x, length: length * chance_of_mask(x, length) / x if x else 0.0)


def sum_of_random_weights(length):
    """L (1 - P(0)): masks that hide no token score nothing."""
    return length * (1 - (0.9 ** (length + 1) - 0.1 ** (length + 1)) / (0.8 * (length + 1)))


@pytest.mark.parametrize(
    ("draws", "definition", "sum_of_weights"),
    [
        (one_step_draws, one_step, lambda length: length),
        (coupled_draws, coupled, lambda length: 1.5 * length),
        (random_draws, random_masks, sum_of_random_weights),
    ],
)
def test_the_mean_over_all_draws_is_the_definition_and_not_the_any_order_bound(draws, definition, sum_of_weights):
    """The bound's weights sum to the length, and so do those of one step, in other states. An EOS alone is scored."""
    each = [draws(row) for row in range(len(LENGTHS))]
    views = stacked([merged(torch.tensor(chances, dtype=torch.float64), drawn) for chances, drawn in each])
    for model in every_model():
        found = scores(model, views).logps
        assert_same(model, found, definition(model))
        assert (found.sum(1) - any_order_bound(model).sum(1))[:2].abs().min() > 0.1
    expected = torch.tensor([float(sum_of_weights(length)) for length in LENGTHS], dtype=torch.float64)
    assert_near(views.weights.sum((1, 2)), expected)


# --- Draws ------------------------------------------------------------------------------------------------------------


def test_one_view_hides_the_whole_canvas_and_draws_each_update_in_its_rows_own_stream():
    maskable = torch.ones(4, 12, dtype=torch.bool)
    maskable[1, :5] = False  # padding, or protected
    sampled = replace(SAMPLED, prompt_ids=maskable.long(), attention_mask=maskable.long(), maskable=maskable)
    shared, chosen = keyed_generator(9), settings(p_mask_prompt=P_MASK)
    random = Randomness([keyed_generator(row) for row in range(4)], shared, 0, 4)
    updates = [ESTIMATORS["one_step"](sampled, random, chosen) for _ in range(4)]
    for row in range(4):
        generator = keyed_generator(row)
        for update in updates:
            assert torch.equal(update.noise[row, 0, :12], draw_mask(maskable[row], P_MASK, generator))
            assert update.noise[:, :, 12:].all()
            assert torch.equal(update.weights, SAMPLED.scored.float().unsqueeze(1))
    assert not torch.equal(updates[0].noise, updates[1].noise)
    with pytest.raises(ValueError, match="shorter"):  # one generator per row
        ESTIMATORS["one_step"](sampled, Randomness([keyed_generator(0)], shared, 0, 1), chosen)


def test_coupled_draws_all_tokens_then_two_masks_that_share_them_out_by_a_uniform_share():
    count, generator = 6000, keyed_generator(3)
    random = Randomness([generator] * count, generator, 0, count)
    views = ESTIMATORS["coupled"](repeated(0, count), random, settings(p_mask_prompt=0.5))
    whole, half, rest = views.noise.unbind(1)
    assert whole[:, PROMPT:].all()
    assert (half ^ rest)[:, PROMPT:].all()
    for view in (half, rest):  # one prompt mask for all three
        assert torch.equal(view[:, :PROMPT], whole[:, :PROMPT])
    assert_sets(whole[:, 1:PROMPT], lambda size: 0.25)  # its first token is padding

    some = half[:, PROMPT:].any(1)
    share = torch.where(some, 0.5 / views.weights[:, 1].amax(-1), 1 - 0.5 / views.weights[:, 2].amax(-1))
    assert share.min() > 0.2 - 1e-6
    assert share.max() < 0.8 + 1e-6
    assert_frequencies(((share - 0.2) / 0.6 * 8).long().clamp(0, 7).bincount(), torch.full((8,), 1 / 8))
    assert_sets(half[:, PROMPT:], lambda x: sum(p / 0.6 * s**x * (1 - s) ** (4 - x) for s, p in quadrature(0.2, 0.8)))


def draw_random(views, **changes):
    sampled = replace(repeated(0, 1), **changes)
    random = Randomness([keyed_generator(3)], keyed_generator(0), 0, 1)
    drawn = ESTIMATORS["random_masks"](sampled, random, settings(p_mask_prompt=0.5, num_views=views))
    return drawn.noise[0], drawn.weights[0]


def test_random_masks_have_the_chances_assumed_above_and_weigh_to_the_length():
    count = 3000
    noise, weights = draw_random(count, scored=torch.tensor([[True] * 3 + [False]]))
    assert noise[:, -1].all()  # after the end
    hidden = noise[:, PROMPT:-1]
    assert_sets(hidden, lambda size: chance_of_mask(size, 3))
    torch.testing.assert_close(weights.sum(-1) * count, torch.where(hidden.any(1), 3.0, 0.0))
    assert torch.equal(weights > 0, torch.cat([hidden, torch.zeros(count, 1, dtype=torch.bool)], dim=1))
    assert_sets(noise[:, 1:PROMPT], lambda size: 0.25)
    long = torch.ones(1, 2000, dtype=torch.long)
    shares = draw_random(800, canvas_ids=long, scored=long.bool())[0][:, PROMPT:].float().mean(-1)
    assert 0.07 < shares.min() < 0.13
    assert 0.87 < shares.max() < 0.93
    assert_frequencies(((shares - 0.1) * 10).long().clamp(0, 7).bincount(), torch.full((8,), 1 / 8))
