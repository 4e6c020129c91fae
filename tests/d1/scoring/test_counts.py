"""Estimators that hide an exact number of tokens: over all draws, and what they draw."""

from dataclasses import replace
from itertools import permutations, product
from math import comb, factorial, log

import pytest
import torch

from d1.masking import keyed_generator
from d1.scoring import ESTIMATORS, Randomness, elbo
from d1.scoring.rollouts import blocks_of, rotation
from tests.d1.scoring.enumeration import (
    CANVAS,
    LENGTHS,
    PROMPT,
    SAMPLED,
    all_states,
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
    some_rows,
    stacked,
    tiny,
)

PARTS = 120  # parts of [0, 1): in each, all numbers give the same counts for completions of up to five tokens
ROWS = len(LENGTHS)


def all_draws(monkeypatch, estimator, row, draws, blocks=None):
    """Every number from which counts are made, with every order of the tokens, as in the estimator itself."""
    length = LENGTHS[row]
    orders = [[place / 9 for place in order] + [1.0] * (CANVAS - length) for order in permutations(range(length))]
    middles = (torch.arange(PARTS, dtype=torch.float64) + 0.5) / PARTS
    cases = list(product([rotation(ROWS, draws, u)[row] for u in middles], orders))
    ups, numbered = torch.stack([up for up, _ in cases]), torch.tensor([order for _, order in cases])
    monkeypatch.setattr(elbo, "spread", lambda random, settings: ups)
    monkeypatch.setattr(elbo, "numbers_of_tokens", lambda sampled, random, n: numbered.unsqueeze(1).expand(-1, n, -1))
    sampled = some_rows(replace(SAMPLED, blocks=blocks), [row] * len(cases))
    random = Randomness([keyed_generator(0)] * len(cases), keyed_generator(0), 0, len(cases))
    views = ESTIMATORS[estimator](sampled, random, settings(num_views=draws))
    return merged(torch.full((len(cases),), 1 / len(cases), dtype=torch.float64), views)


def mean(monkeypatch, estimator, draws=1, blocks=None):
    return stacked([all_draws(monkeypatch, estimator, row, draws, blocks) for row in range(ROWS)])


def by_size(model, row):
    """[x]: the mean over all sets of x tokens of a row's completion of the hidden tokens' log-probs, (canvas,) each."""
    length = LENGTHS[row]
    means = [torch.zeros(CANVAS, dtype=torch.float64) for _ in range(length + 1)]
    for some, logps in all_states(model, row).items():
        means[len(some)] = means[len(some)] + marked(some) * logps / comb(length, len(some))
    return means


@pytest.mark.parametrize("draws", [1, 2, 3])
def test_the_mean_over_all_counts_is_the_any_order_bound_or_the_sum_of_the_blocks(monkeypatch, draws):
    views = mean(monkeypatch, "counts", draws)
    for model in every_model():
        assert_same(model, scores(model, views).logps, any_order_bound(model))
    model = tiny(2, block=2)
    found = mean(monkeypatch, "counts", draws, blocks_of(SAMPLED.attention_mask, CANVAS, 2))
    assert_same(model, scores(model, found).logps, blocks_bounds(model, 2))


def test_the_mean_over_all_complements_is_half_of_all_tokens_each_where_it_is_hidden(monkeypatch):
    """A count is uniform on 0..L, and so is the count of its complement."""
    views = mean(monkeypatch, "complements", 2)
    torch.testing.assert_close(views.weights.sum(1), SAMPLED.scored.double() / 2)
    for model in every_model():
        expected = [sum(by_size(model, row)) / (length + 1) for row, length in enumerate(LENGTHS)]
        assert_same(model, scores(model, views).logps, torch.stack(expected))


GAUSS = [((1 - 0.6**0.5) / 2, 5 / 18), (1 / 2, 4 / 9), ((1 + 0.6**0.5) / 2, 5 / 18)]  # times and their parts


def hidden_by_gauss(length):
    return [max(1, int(t * length)) for t, _ in GAUSS]


def test_the_mean_over_all_gauss_draws_is_the_quadrature(monkeypatch):
    views = mean(monkeypatch, "gauss")
    for model in every_model():
        rows = [torch.zeros(CANVAS, dtype=torch.float64) for _ in LENGTHS]
        for row, length in enumerate(LENGTHS[:3]):
            means = by_size(model, row)
            rows[row] = sum(w / t * means[count] for (t, w), count in zip(GAUSS, hidden_by_gauss(length), strict=True))
        assert_same(model, scores(model, views).logps, torch.stack(rows))


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
    generators = [keyed_generator(seed, 1, row) for row in range(first, first + rows)]
    random = Randomness(generators, keyed_generator(seed), first, total or rows)
    views = ESTIMATORS[estimator](sampled, random, settings(**chosen))
    assert views.noise[..., -1].all()  # after the end
    assert not views.weights[..., -1].any()
    return views.noise[..., PROMPT:-1], views.weights[..., :-1]


@pytest.mark.parametrize(("length", "mean_weight"), [(1, None), (5, 1.10), (20, 0.96), (1000, 1.0)])
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
    sets = (hidden * 2 ** torch.arange(length)).sum(-1)
    sizes = [bin(some).count("1") for some in range(2**length)]
    chances = torch.tensor([1 / (length * comb(length, size)) if size else 0.0 for size in sizes])
    for view in sets.unbind(1):
        assert_frequencies(view.bincount(minlength=2**length), chances)
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
        apart = [drawn("counts", length, 1, first=row, total=rows, **options)[0].sum(-1) for row in range(rows)]
        assert torch.equal(torch.cat(apart), counts)


def test_the_counts_of_blocks_are_as_far_up_their_lengths_as_one_number_says():
    blocks = [3, 4, 4, 4, 4, 5, 5, 5]  # of one token, of four, and of two with one more after the end
    hidden, weights = drawn("counts", 7, rows=2000, blocks=blocks)
    per_block = torch.stack([hidden[:, 0, :1].sum(-1), hidden[:, 0, 1:5].sum(-1), hidden[:, 0, 5:].sum(-1)], dim=1)
    assert (per_block[:, 0] == 1).all()
    assert_frequencies(per_block[:, 1].bincount(minlength=5), torch.tensor([0, 1, 1, 1, 1]) / 4)
    assert torch.equal(per_block[:, 2], (per_block[:, 1] + 1) // 2)
    expected = torch.tensor([1, 4, 2]) / per_block
    torch.testing.assert_close(weights[:, 0], hidden[:, 0] * expected.repeat_interleave(torch.tensor([1, 4, 2]), 1))
    sets = (hidden[:, 0, 1:5] * 2 ** torch.arange(4)).sum(-1)  # each set of a count equally often
    sizes = [bin(some).count("1") for some in range(16)]
    chances = torch.tensor([1 / (4 * comb(4, size)) if size else 0.0 for size in sizes])
    assert_frequencies(sets.bincount(minlength=16), chances)


def test_complements_take_each_token_once_a_draw_with_the_weight_one_half():
    """Divided by the number of draws, like every weight."""
    hidden, weights = drawn("complements", 4, rows=500, num_views=3)
    assert torch.equal(hidden[:, 3:], ~hidden[:, :3])
    torch.testing.assert_close(weights, hidden / 6)
    for row in weights.unflatten(1, (2, 3)).sum(1):  # each draw's two views
        torch.testing.assert_close(row, torch.full((3, 4), 1 / 6))
    counts = hidden[:, 0].sum(-1)
    assert_frequencies(counts.bincount(minlength=5), torch.full((5,), 1 / 5))


def variance_of_counts(sums):
    """For 16 stratified draws: each count of 1..4 occurs four times, so only the set varies."""
    return sum(4 * (4 / (16 * x)) ** 2 * torch.stack(some).var(unbiased=False) for x, some in enumerate(sums[1:], 1))


def variance_of_elbo(sums):
    """For 16 stratified draws: times t_v = (v + u) / 16, at which a set of x is drawn with probability t^x (1 - t)^(4 -
    x) and its sum has the weight 1 / t. The second moment for sets of one token would be infinite without the smallest
    time, 2^-24."""
    squares = [float(sum(value**2 for value in some)) for some in sums]
    second = squares[1] * (24 * log(2) - 11 / 6)  # the integral of (1 - t)^3 / t
    second += sum(squares[x] * factorial(x - 2) * factorial(4 - x) / 6 for x in (2, 3, 4))

    def mean(t):
        return sum(t ** (x - 1) * (1 - t) ** (4 - x) * float(sum(sums[x])) for x in range(1, 5))

    within = second - sum(p * mean(t) ** 2 for t, p in quadrature(points=4))
    means = [(sum(mean((v + u) / 16) for v in range(16)) / 16, p) for u, p in quadrature(points=4)]
    return within / 16 + sum(p * m**2 for m, p in means) - sum(p * m for m, p in means) ** 2


@pytest.mark.parametrize(("layers", "seed"), [(1, 0), (2, 0), (1, 4), (2, 4)])
def test_sixteen_draws_of_exact_counts_have_a_third_of_the_standard_deviation_of_independent_tokens(layers, seed):
    model, rows = tiny(layers, seed), 300
    with torch.no_grad():
        states = all_states(model, 0)
        bound = any_order_bound(model)[0].sum()
    totals, sums = torch.zeros(16, dtype=torch.float64), [[] for _ in range(5)]
    for some, logps in states.items():
        totals[sum(2**k for k in some)] = logps[list(some)].sum()
        sums[len(some)].append(logps[list(some)].sum())
    random = Randomness([keyed_generator(1, row) for row in range(rows)], keyed_generator(2), 0, rows)
    views = ESTIMATORS["counts"](repeated(0, rows), random, settings(num_views=16, stratified=True))
    sets = (views.noise[..., PROMPT:] * 2 ** torch.arange(4)).sum(-1)
    estimates = (views.weights.amax(-1) * totals[sets]).sum(1)
    assert abs(estimates.mean() - bound) < 4 * (estimates.var() / rows) ** 0.5
    assert float(estimates.var() / variance_of_counts(sums)) == pytest.approx(1, abs=0.25)
    assert variance_of_counts(sums) < variance_of_elbo(sums) / 9
