"""Estimates of the any-order bound: the mean over all draws is the bound, and draws have the assumed probabilities."""

from itertools import permutations, product
from math import comb

import pytest
import torch

from d1.masking import keyed_generator
from d1.scoring import ESTIMATORS, Randomness
from d1.scoring.elbo import elbo_views, espo_views
from d1.scoring.rollouts import rotation
from tests.d1.scoring.enumeration import (
    CANVAS,
    LENGTHS,
    PROMPT,
    SAMPLED,
    any_order_bound,
    assert_frequencies,
    assert_same,
    blocks_bounds,
    every_model,
    marked,
    merged,
    quadrature,
    repeated,
    scores,
    settings,
    stacked,
    subsets,
    tiny,
)


def spreads(kind, row):
    """The positions of a row's one or two draws in [0, 1), (draws,), and their probability; the integrand is a
    polynomial."""
    if kind == "one":
        return [((u,), chance) for u, chance in quadrature()]
    if kind == "two":
        points = quadrature(points=3)
        return [((u, v), p * q) for (u, p), (v, q) in product(points, points)]
    # Between the points where one of the batch's numbers passes 1.
    turned = quadrature(parts=2 * len(LENGTHS))
    return [
        (tuple(rotation(len(LENGTHS), 2, torch.tensor(u, dtype=torch.float64))[row].tolist()), chance)
        for u, chance in turned
    ]


def all_elbo_draws(kind, row, antithetic):
    length, cases = LENGTHS[row], []
    for times, chance in spreads(kind, row):
        for hidden in product(subsets(range(length)), repeat=len(times)):
            each = [t ** len(h) * (1 - t) ** (length - len(h)) for t, h in zip(times, hidden, strict=True)]
            cases.append((times, hidden, chance * torch.tensor(each, dtype=torch.float64).prod()))
    times, hidden, chances = zip(*cases, strict=True)
    numbers = torch.stack([torch.stack([1 - marked(h).float() for h in some]) for some in hidden])
    scored, noise = SAMPLED.scored[row].expand(len(cases), -1), torch.zeros(len(cases), 1, PROMPT, dtype=torch.bool)
    views = elbo_views(noise, torch.tensor(times, dtype=torch.float64), numbers, scored, antithetic)
    return torch.stack(chances), views


def all_espo_draws(kind, row, antithetic):
    """Counts are whole: within each of these equal parts of [0, 1), every number gives the same counts."""
    length, cases = LENGTHS[row], []
    orders = [torch.tensor([*order, *range(length, CANVAS)]) for order in permutations(range(length))]
    parts = quadrature(parts=(length + 1) * 2 * len(LENGTHS), points=1)
    if kind == "one":
        numbers = [(u,) for u, _ in parts]
    elif kind == "two":
        numbers = list(product([(x + 0.5) / (length + 1) for x in range(length + 1)], repeat=2))
    else:
        numbers = [
            tuple(rotation(len(LENGTHS), 2, torch.tensor(u, dtype=torch.float64))[row].tolist()) for u, _ in parts
        ]
    for some in numbers:
        counts = torch.tensor(some).mul(length + 1).long()
        # The views of the two draws are separate, so not all pairs of their sets are needed.
        cases += [(counts, torch.stack([order] * len(some))) for order in orders]
    counts, ranks = (torch.stack(values) for values in zip(*cases, strict=True))
    scored, noise = SAMPLED.scored[row].expand(len(cases), -1), torch.zeros(len(cases), 1, PROMPT, dtype=torch.bool)
    chances = torch.full((len(cases),), 1 / len(cases), dtype=torch.float64)
    return chances, espo_views(noise, counts, ranks, scored, antithetic)


@pytest.mark.parametrize("antithetic", [False, True])
@pytest.mark.parametrize("kind", ["one", "two", "two rotated"])
@pytest.mark.parametrize("all_draws", [all_elbo_draws, all_espo_draws])
def test_the_mean_over_all_draws_is_the_any_order_bound(all_draws, kind, antithetic):
    views = stacked([merged(*all_draws(kind, row, antithetic)) for row in range(len(LENGTHS))])
    for model in every_model():
        assert_same(model, scores(model, views).logps, any_order_bound(model))


def test_a_time_for_all_blocks_estimates_the_sum_of_the_blocks_bounds():
    """In each block, a mask drawn over the whole completion equals one drawn in that block, at the block's own time."""
    model = tiny(2, block=2)
    assert_same(model, any_order_bound(model), blocks_bounds(model, 2))


def hidden_sets(views, length):
    """(rows, views) the hidden tokens of a completion as a number: token k counts 2^k."""
    return (views.noise[..., PROMPT : PROMPT + length] * 2 ** torch.arange(length)).sum(-1)


def sizes_of(sets):
    return torch.tensor([bin(some).count("1") for some in sets.tolist()])


def set_chances(length):
    """The probability of each set of tokens: a uniform count, then a uniform set. A uniform time gives the same (a beta
    integral)."""
    return torch.tensor([1 / ((length + 1) * comb(length, int(x))) for x in sizes_of(torch.arange(2**length))])


def draws_of(estimator, row, count, **chosen):
    """Views of one row of a batch of four, in this number of rollouts."""
    own, shared = keyed_generator(1), keyed_generator(2)
    random = Randomness([own], shared, first_row=2, total_rows=4)
    some = [ESTIMATORS[estimator].draw(repeated(row, 1), random, settings(**chosen)) for _ in range(count)]
    return stacked(some)


@pytest.mark.parametrize("row", [0, 1])
@pytest.mark.parametrize("stratified", [False, True])
def test_elbo_draws_have_the_chances_of_a_uniform_time_and_independent_tokens(stratified, row):
    length = LENGTHS[row]
    views = draws_of("elbo", row, 1000, num_views=2, antithetic=True, stratified=stratified)
    sets, heaviest = hidden_sets(views, length), views.weights.amax(-1)
    assert torch.equal(sets[:, 2:], 2**length - 1 - sets[:, :2])  # the complement hides the others
    for view in (0, 1):
        # A view's weight is 1 / (2 x draws x time), its complement's 1 / (2 x draws x (1 - time)): a weight gives the
        # time.
        time = torch.where(sets[:, view] > 0, 0.25 / heaviest[:, view], 1 - 0.25 / heaviest[:, view + 2])
        both = (sets[:, view] > 0) & (sets[:, view + 2] > 0)
        torch.testing.assert_close((0.25 / heaviest[:, view] + 0.25 / heaviest[:, view + 2])[both], time[both] * 0 + 1)
        assert_frequencies(sets[:, view].bincount(minlength=2**length), set_chances(length))
        halves = [(x, part) for x in range(length + 1) for part in (0, 1)]
        chances = [
            comb(length, x) * sum(p * t**x * (1 - t) ** (length - x) for t, p in quadrature(part / 2, (part + 1) / 2))
            for x, part in halves
        ]
        cells = sizes_of(sets[:, view]) * 2 + (time >= 0.5)
        assert_frequencies(cells.bincount(minlength=len(halves)), torch.tensor(chances))


@pytest.mark.parametrize("row", [0, 1])
@pytest.mark.parametrize("stratified", [False, True])
def test_espo_draws_have_the_chances_of_a_uniform_count_and_a_uniform_set(stratified, row):
    length = LENGTHS[row]
    views = draws_of("espo", row, 1000, num_views=2, antithetic=True, stratified=stratified)
    sets = hidden_sets(views, length)
    assert torch.equal(sets[:, 2:], 2**length - 1 - sets[:, :2])
    for view in range(4):
        count = sizes_of(sets[:, view])
        expected = torch.where(count > 0, (length + 1) / (4 * count.clamp(min=1)), 0)
        torch.testing.assert_close(views.weights[:, view].amax(-1), expected)
    for view in (0, 1):
        assert_frequencies(sets[:, view].bincount(minlength=2**length), set_chances(length))


def test_two_draws_of_a_row_are_independent_or_half_of_the_interval_apart():
    pairs = {}
    for stratified in (False, True):
        views = draws_of("espo", 1, 1000, num_views=2, stratified=stratified)
        count = (views.weights > 0).sum(-1)
        pairs[stratified] = count[:, 0] * 4 + count[:, 1]
    assert_frequencies(pairs[False].bincount(minlength=16), torch.full((16,), 1 / 16))
    # (u, u + 1/2): counts of floor(4 u) and floor(4 (u + 1/2) mod 4) are two apart.
    opposed = torch.tensor([0.25 if (a - b) % 4 == 2 else 0.0 for a in range(4) for b in range(4)])
    assert_frequencies(pairs[True].bincount(minlength=16), opposed)
