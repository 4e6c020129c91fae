"""Estimates of the any-order bound: the mean over all draws is the bound, and draws have the assumed probabilities."""

from dataclasses import replace
from itertools import permutations, product
from math import comb

import pytest
import torch

from d1.masking import keyed_generator
from d1.rl.tables import ESTIMATORS
from d1.scoring import Randomness, elbo
from d1.scoring.elbo import elbo_views, espo_views
from d1.scoring.inputs import canvas_blocks, rotation
from tests.d1.scoring.enumeration import (
    CANVAS,
    LENGTHS,
    PROMPT,
    SAMPLED,
    any_order_bound,
    assert_frequencies,
    assert_same,
    assert_sets,
    blocks_bounds,
    every_model,
    marked,
    merged,
    of_row,
    quadrature,
    randomness,
    repeated,
    scores,
    settings,
    some_rows,
    stacked,
    subsets,
    sum_over_sets,
    tiny,
)

ROWS = len(LENGTHS)

# --- Means over all draws: elbo and espo, by their pure functions -----------------------------------------------------


def rotated(u, row, draws=2):
    return tuple(rotation(ROWS, draws, torch.tensor(u, dtype=torch.float64))[row].tolist())


def spreads(kind, row):
    """The positions of a row's one or two draws in [0, 1), (draws,), and their probability; the integrand is a
    polynomial."""
    if kind == "one":
        return [((u,), chance) for u, chance in quadrature()]
    if kind == "two":
        return [((u, v), p * q) for (u, p), (v, q) in product(quadrature(), quadrature())]
    # Between the points where one of the batch's numbers passes 1.
    return [(rotated(u, row), chance) for u, chance in quadrature(parts=2 * ROWS)]


def all_elbo_draws(kind, row, antithetic):
    length, cases = LENGTHS[row], []
    for times, chance in spreads(kind, row):
        for hidden in product(subsets(range(length)), repeat=len(times)):
            each = [t ** len(h) * (1 - t) ** (length - len(h)) for t, h in zip(times, hidden, strict=True)]
            cases.append((times, hidden, chance * torch.tensor(each, dtype=torch.float64).prod()))
    times, hidden, chances = zip(*cases, strict=True)
    numbers = torch.stack([torch.stack([1 - marked(h).float() for h in some]) for some in hidden])
    noise, scored = of_row(row, len(cases))
    views = elbo_views(noise, torch.tensor(times, dtype=torch.float64), numbers, scored, antithetic)
    return torch.stack(chances), views


def all_espo_draws(kind, row, antithetic):
    """Counts are whole: within each of these equal parts of [0, 1), every number gives the same counts."""
    length, cases = LENGTHS[row], []
    orders = [torch.tensor([*order, *range(length, CANVAS)]) for order in permutations(range(length))]
    parts = quadrature(parts=(length + 1) * 2 * ROWS, points=1)
    if kind == "one":
        numbers = [(u,) for u, _ in parts]
    elif kind == "two":
        numbers = list(product([(x + 0.5) / (length + 1) for x in range(length + 1)], repeat=2))
    else:
        numbers = [rotated(u, row) for u, _ in parts]
    for some in numbers:
        counts = torch.tensor(some).mul(length + 1).long()
        # The views of the two draws are separate, so not all pairs of their sets are needed.
        cases += [(counts, torch.stack([order] * len(some))) for order in orders]
    counts, ranks = (torch.stack(values) for values in zip(*cases, strict=True))
    noise, scored = of_row(row, len(cases))
    chances = torch.full((len(cases),), 1 / len(cases), dtype=torch.float64)
    return chances, espo_views(noise, counts, ranks, scored, antithetic)


@pytest.mark.parametrize("antithetic", [False, True])
@pytest.mark.parametrize("kind", ["one", "two", "two rotated"])
@pytest.mark.parametrize("all_draws", [all_elbo_draws, all_espo_draws])
def test_the_mean_over_all_draws_is_the_any_order_bound(all_draws, kind, antithetic):
    views = stacked([merged(*all_draws(kind, row, antithetic)) for row in range(ROWS)])
    for model in every_model():
        assert_same(model, scores(model, views).logps, any_order_bound(model))


def test_a_time_for_all_blocks_estimates_the_sum_of_the_blocks_bounds():
    """In each block, a mask drawn over the whole completion equals one drawn in that block, at the block's own time."""
    model = tiny(2, block=2)
    assert_same(model, any_order_bound(model), blocks_bounds(model, 2))


# --- Means over all draws: exact counts, by the estimators themselves -------------------------------------------------

PARTS = 120  # parts of [0, 1): in each, all numbers give the same counts for completions of up to five tokens


@pytest.fixture
def mean(monkeypatch):
    """`mean(estimator, draws, blocks)`: views over every number from which counts are made, with every order of the
    tokens."""

    def of_row(estimator, row, draws, blocks):
        length = LENGTHS[row]
        orders = [[rank / 9 for rank in order] + [1.0] * (CANVAS - length) for order in permutations(range(length))]
        middles = (torch.arange(PARTS, dtype=torch.float64) + 0.5) / PARTS
        cases = list(product([rotation(ROWS, draws, u)[row] for u in middles], orders))
        ups, numbered = torch.stack([up for up, _ in cases]), torch.tensor([order for _, order in cases])
        monkeypatch.setattr(elbo, "draw_uniform", lambda random, settings: ups)
        monkeypatch.setattr(elbo, "numbers_of_tokens", lambda rows, random, n: numbered.unsqueeze(1).expand(-1, n, -1))
        sampled = some_rows(replace(SAMPLED, blocks=blocks), [row] * len(cases))
        views = ESTIMATORS[estimator](sampled, randomness(len(cases)), settings(num_views=draws))
        return merged(torch.full((len(cases),), 1 / len(cases), dtype=torch.float64), views)

    return lambda estimator, draws=1, blocks=None: stacked(
        [of_row(estimator, row, draws, blocks) for row in range(ROWS)]
    )


@pytest.mark.parametrize("draws", [1, 2, 3])
def test_the_mean_over_all_counts_is_the_any_order_bound_or_the_sum_of_the_blocks(mean, draws):
    views = mean("counts", draws)
    for model in every_model():
        assert_same(model, scores(model, views).logps, any_order_bound(model))
    model = tiny(2, block=2)
    found = mean("counts", draws, canvas_blocks(SAMPLED.attention_mask, CANVAS, 2))
    assert_same(model, scores(model, found).logps, blocks_bounds(model, 2))


GAUSS = [((1 - 0.6**0.5) / 2, 5 / 18), (1 / 2, 4 / 9), ((1 + 0.6**0.5) / 2, 5 / 18)]  # times and their parts


def hidden_by_gauss(length):
    return [max(1, int(t * length)) for t, _ in GAUSS]


def gauss_weight(x, length):
    counts = zip(GAUSS, hidden_by_gauss(length), strict=True)
    return sum(w / t for (t, w), count in counts if count == x) / comb(length, x)


def complements_weight(x, length):
    """Half of all tokens, each where it is hidden: a count is uniform on 0..L, and so is that of its complement."""
    return 1 / ((length + 1) * comb(length, x))


@pytest.mark.parametrize(("estimator", "weight"), [("gauss", gauss_weight), ("complements", complements_weight)])
def test_the_mean_over_all_draws_is_the_quadrature_or_half_of_all_tokens(mean, estimator, weight):
    views = mean(estimator, 2)
    for model in every_model():
        assert_same(model, scores(model, views).logps, sum_over_sets(model, weight))


# --- Draws of elbo and espo -------------------------------------------------------------------------------------------


def draws_of(estimator, row, count, **chosen):
    """The hidden tokens and weights of the views of one row of a batch of four, in this number of rollouts."""
    random = Randomness([keyed_generator(1)], keyed_generator(2), first_row=2, total_rows=4)
    some = [ESTIMATORS[estimator](repeated(row, 1), random, settings(**chosen)) for _ in range(count)]
    views = stacked(some)
    return views.noise[..., PROMPT : PROMPT + LENGTHS[row]], views.weights.amax(-1)


@pytest.mark.parametrize("estimator", ["elbo", "espo"])
@pytest.mark.parametrize("row", [0, 1])
@pytest.mark.parametrize("stratified", [False, True])
def test_draws_have_the_chances_of_a_uniform_time_or_count_and_independent_tokens(estimator, stratified, row):
    """A uniform count, then a uniform set; a uniform time gives the same (a beta integral)."""
    length = LENGTHS[row]
    hidden, heaviest = draws_of(estimator, row, 1000, num_views=2, antithetic=True, stratified=stratified)
    assert torch.equal(hidden[:, 2:], ~hidden[:, :2])  # the complement hides the others
    sizes = hidden.sum(-1)
    if estimator == "espo":
        expected = torch.where(sizes > 0, (length + 1) / (4 * sizes.clamp(min=1)), 0)
        torch.testing.assert_close(heaviest, expected)
    for view in (0, 1):
        assert_sets(hidden[:, view], lambda size: 1 / ((length + 1) * comb(length, size)))
        if estimator == "elbo":
            # A view's weight is 1 / (2 x draws x time), its complement's 1 / (2 x draws x (1 - time)): a weight gives
            # the time.
            size, other = sizes[:, view], sizes[:, view + 2]
            time = torch.where(size > 0, 0.25 / heaviest[:, view], 1 - 0.25 / heaviest[:, view + 2])
            total = (0.25 / heaviest[:, view] + 0.25 / heaviest[:, view + 2])[(size > 0) & (other > 0)]
            torch.testing.assert_close(total, torch.ones_like(total))
            halves = [(x, part) for x in range(length + 1) for part in (0, 1)]
            chances = [
                comb(length, x)
                * sum(p * t**x * (1 - t) ** (length - x) for t, p in quadrature(part / 2, (part + 1) / 2))
                for x, part in halves
            ]
            cells = size * 2 + (time >= 0.5)
            assert_frequencies(cells.bincount(minlength=len(halves)), torch.tensor(chances))


def test_two_draws_of_a_row_are_independent_or_half_of_the_interval_apart():
    pairs = {}
    for stratified in (False, True):
        count = draws_of("espo", 1, 1000, num_views=2, stratified=stratified)[0].sum(-1)
        pairs[stratified] = count[:, 0] * 4 + count[:, 1]
    assert_frequencies(pairs[False].bincount(minlength=16), torch.full((16,), 1 / 16))
    # (u, u + 1/2): counts of floor(4 u) and floor(4 (u + 1/2) mod 4) are two apart.
    opposed = torch.tensor([0.25 if (a - b) % 4 == 2 else 0.0 for a in range(4) for b in range(4)])
    assert_frequencies(pairs[True].bincount(minlength=16), opposed)


# --- Draws of exact counts --------------------------------------------------------------------------------------------


def drawn(estimator, length, rows=1, seed=0, first=0, total=None, blocks=None, **chosen):
    """Views of completions of `length` tokens on a canvas with one more token: the hidden tokens of each view, and
    weights."""
    width = length + 1
    sampled = replace(
        repeated(0, rows),
        canvas_ids=torch.ones(rows, width, dtype=torch.long),
        scored=(torch.arange(width) < length).expand(rows, -1),
        blocks=None if blocks is None else torch.tensor(blocks).expand(rows, -1),
    )
    views = ESTIMATORS[estimator](sampled, randomness(rows, first, total, seed), settings(**chosen))
    assert views.noise[..., -1].all()  # after the end
    assert not views.weights[..., -1].any()
    return views.noise[..., PROMPT:-1], views.weights[..., :-1]


@pytest.mark.parametrize(("length", "mean_weight"), [(1, None), (5, 1.10), (20, 0.96), (256, 0.99), (1000, 1.0)])
def test_gauss_hides_exact_counts_with_the_rules_weights_and_is_biased_for_short_answers(length, mean_weight):
    """The floor of t L moves the times of the quadrature rule: a token's weights sum to 1 only for many tokens."""
    hidden, weights = drawn("gauss", length, rows=3)
    for view, ((t, w), count) in enumerate(zip(GAUSS, hidden_by_gauss(length), strict=True)):
        assert hidden[:, view].sum(-1).tolist() == [count] * 3
        torch.testing.assert_close(weights[:, view], hidden[:, view] * torch.tensor(w / t), rtol=1e-6, atol=0)
    if mean_weight is not None:
        assert weights.sum().item() / 3 / length == pytest.approx(mean_weight, abs=0.005)


@pytest.mark.parametrize("length", [3, 4])
def test_counts_hide_exactly_x_tokens_for_x_of_1_to_the_length_and_weigh_them_by_the_length_over_x(length):
    hidden, weights = drawn("counts", length, rows=3000, num_views=2)
    x = hidden.sum(-1, keepdim=True)
    torch.testing.assert_close(weights, hidden * length / (2 * x))
    for view in hidden.unbind(1):
        assert_sets(view, lambda size: 1 / (length * comb(length, size)) if size else 0.0)
    pairs = ((x[:, 0] - 1) * length + x[:, 1] - 1).squeeze(-1)
    assert_frequencies(pairs.bincount(minlength=length**2), torch.full((length**2,), 1 / length**2))


@pytest.mark.parametrize(("length", "draws", "rows"), [(4, 16, 1), (4, 2, 6), (5, 5, 3), (64, 16, 4)])
def test_stratified_counts_are_spread_evenly_over_1_to_the_length(length, draws, rows):
    """All counts are equally frequent, in a row and in all rows of the rollout, whichever process has a row."""
    for seed in range(5):
        options = {"num_views": draws, "stratified": True, "seed": seed}
        counts = drawn("counts", length, rows, **options)[0].sum(-1)
        for some in (counts.flatten(), *counts):
            often = some.bincount(minlength=length + 1)[1:].float()
            assert (often - len(some) / length).abs().max() < 1


def test_the_counts_of_blocks_are_as_far_up_their_lengths_as_one_number_says():
    blocks = [3, 4, 4, 4, 4, 5, 5, 5]  # of one token, of four, and of two with one more after the end
    hidden, weights = drawn("counts", 7, rows=2000, blocks=blocks)
    per_block = torch.stack([hidden[:, 0, :1].sum(-1), hidden[:, 0, 1:5].sum(-1), hidden[:, 0, 5:].sum(-1)], dim=1)
    assert (per_block[:, 0] == 1).all()
    assert torch.equal(per_block[:, 2], (per_block[:, 1] + 1) // 2)
    expected = torch.tensor([1, 4, 2]) / per_block
    torch.testing.assert_close(weights[:, 0], hidden[:, 0] * expected.repeat_interleave(torch.tensor([1, 4, 2]), 1))
    # Each count of 1..4 and each set of a count equally often.
    assert_sets(hidden[:, 0, 1:5], lambda size: 1 / (4 * comb(4, size)) if size else 0.0)


def test_stratified_counts_are_spread_evenly_over_the_draws_and_blocks_of_a_row():
    """EBPO's grid: one number per draw and block, equally spaced from a random start (blocks that end early, too)."""
    blocks, draws = [3] * 5 + [4] * 7 + [5], 4
    hidden, weights = drawn("counts", 12, rows=40, blocks=blocks, num_views=draws, stratified=True)
    found = torch.stack([hidden[..., :5].sum(-1), hidden[..., 5:12].sum(-1)], dim=-1)  # (rows, draws, blocks)
    for row in found.tolist():
        grids = []
        for part in range(5 * 7 * 2 * draws):  # parts of [0, 1) in which every start gives the same counts
            start = (part + 0.5) / (5 * 7 * 2 * draws)
            grid = [[(start + (2 * draw + block) / (2 * draws)) % 1 for block in (0, 1)] for draw in range(draws)]
            grids.append(sorted([int(5 * one) + 1, int(7 * two) + 1] for one, two in grid))
        assert sorted(row) in grids
    lengths = torch.tensor([5] * 5 + [7] * 7)
    per_token = found.repeat_interleave(torch.tensor([5, 7]), dim=-1)
    torch.testing.assert_close(weights[..., :12], hidden[..., :12] * lengths / (draws * per_token))


def test_complements_take_each_token_once_a_draw_with_the_weight_one_half():
    """Divided by the number of draws, like every weight."""
    hidden, weights = drawn("complements", 4, rows=500, num_views=3)
    assert torch.equal(hidden[:, 3:], ~hidden[:, :3])
    torch.testing.assert_close(weights, hidden / 6)
    assert_frequencies(hidden[:, 0].sum(-1).bincount(minlength=5), torch.full((5,), 1 / 5))
