"""coupled-GRPO's estimator, compared with its own definition integrated over all shares and masks: it is not the
bound."""

import torch

from d1.masking import keyed_generator
from d1.scoring import ESTIMATORS, Randomness
from d1.scoring.masks import SHARES, coupled_views
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
    cases = [
        (share, marked(half), p / (SHARES[1] - SHARES[0]) * share ** len(half) * (1 - share) ** (length - len(half)))
        for share, p in quadrature(*SHARES)
        for half in subsets(range(length))
    ]
    shares, halves, chances = zip(*cases, strict=True)
    noise = torch.zeros(len(cases), 1, PROMPT, dtype=torch.bool)
    scored = SAMPLED.scored[row].expand(len(cases), -1)
    views = coupled_views(noise, torch.stack(halves), torch.tensor(shares, dtype=torch.float64), scored)
    return torch.tensor(chances, dtype=torch.float64), views


def definition(model):
    """Half of one step's log-probs, plus half of those of two complementary masks. Each of these is, for a share s in
    (.2, .8), E[log p of hidden tokens] / s; both have the same distribution."""
    rows = []
    for row, length in enumerate(LENGTHS):
        states = all_states(model, row)
        total = marked(range(length)) * states[tuple(range(length))] / 2
        for some in states:
            x = len(some)
            chance = sum(p / 0.6 * s ** (x - 1) * (1 - s) ** (length - x) for s, p in quadrature(0.2, 0.8, points=5))
            total = total + marked(some) * states[some] * chance
        rows.append(total)
    return torch.stack(rows)


def test_the_mean_over_all_draws_is_the_definition_and_not_the_any_order_bound():
    views = stacked([merged(*all_draws(row)) for row in range(len(LENGTHS))])
    for model in every_model():
        found = scores(model, views).logps
        assert_same(model, found, definition(model))
        assert (found.sum(1) - any_order_bound(model).sum(1))[:2].abs().min() > 0.1
    # The weights of each token sum to one and a half; the bound's weights sum to the length. So an EOS alone is scored,
    # too.
    torch.testing.assert_close(views.weights.sum((1, 2)), 1.5 * torch.tensor(LENGTHS, dtype=torch.float64))


def test_draws_are_all_tokens_then_two_masks_that_share_them_out_by_a_uniform_share():
    count = 6000
    generator = keyed_generator(3)
    random = Randomness([generator] * count, generator, 0, count)
    views = ESTIMATORS["coupled"].draw(repeated(0, count), random, settings(p_mask_prompt=0.5))
    whole, half, rest = views.noise.unbind(1)
    assert whole[:, PROMPT:].all()
    assert (half ^ rest)[:, PROMPT:].all()
    for view in (half, rest):  # one prompt mask for all three
        assert torch.equal(view[:, :PROMPT], whole[:, :PROMPT])
    assert_frequencies((whole[:, :PROMPT] * torch.tensor([0, 1, 2])).sum(-1).bincount(), torch.full((4,), 0.25))

    sets = (half[:, PROMPT:] * 2 ** torch.arange(CANVAS)).sum(-1)
    share = torch.where(sets > 0, 0.5 / views.weights[:, 1].amax(-1), 1 - 0.5 / views.weights[:, 2].amax(-1))
    assert share.min() > 0.2 - 1e-6
    assert share.max() < 0.8 + 1e-6
    assert_frequencies(((share - 0.2) / 0.6 * 8).long().clamp(0, 7).bincount(), torch.full((8,), 1 / 8))
    sizes = [bin(some).count("1") for some in range(16)]
    chances = [sum(p / 0.6 * s**x * (1 - s) ** (4 - x) for s, p in quadrature(0.2, 0.8)) for x in sizes]
    assert_frequencies(sets.bincount(minlength=16), torch.tensor(chances))
