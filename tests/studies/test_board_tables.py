"""The leaderboard's final table: the bootstrap against its closed-form moments, ranks, and the order of tables."""

import numpy as np
import pytest
from scipy.stats import spearmanr

from studies.leaderboard.plan import SETUPS, START
from studies.leaderboard.tables import (
    Table,
    interval,
    not_worse,
    order,
    order_kept,
    p_value,
    rank_correlations,
    resampled_means,
)


def second_moments(scores):
    """E of the product of two methods' resampled means: weights of seeds are multinomial, those of problems too."""
    _, seeds, problems = scores.shape
    of_seeds = np.full((seeds, seeds), 1 - 1 / seeds) + np.eye(seeds)
    of_problems = np.full((problems, problems), 1 - 1 / problems) + np.eye(problems)
    return np.einsum("asp,btq,st,pq->ab", scores, scores, of_seeds, of_problems) / (seeds * problems) ** 2


def test_draws_have_the_moments_of_two_independent_multinomials():
    generator = np.random.default_rng(0)
    scores = (generator.uniform(size=(3, 4, 30)) < generator.uniform(size=(1, 4, 30))).astype(int)
    draws = resampled_means(scores, draws=40_000)
    assert draws.mean(1) == pytest.approx(scores.mean((1, 2)), abs=2e-3)
    expected = second_moments(scores) - np.outer(scores.mean((1, 2)), scores.mean((1, 2)))
    assert np.cov(draws) == pytest.approx(expected, abs=1.5e-4)  # the smallest is 1.2e-3


def test_a_method_never_differs_from_its_copy_and_pairing_cancels_what_both_share():
    scores = np.random.default_rng(1).integers(0, 2, size=(1, 8, 50)).repeat(2, axis=0)
    a, b = resampled_means(scores, draws=100)
    assert (a == b).all()
    assert p_value(a - b) == 1.0
    assert interval(0.0, a - b) == (0.0, 0.0, 0.0)


def test_p_values_and_margins_are_shares_of_draws():
    draws = np.arange(-20, 980) / 1000 + 1e-9  # 20 of 1,000 are below 0
    assert p_value(draws) == pytest.approx(2 * 21 / 1001)
    assert p_value(-draws) == p_value(draws)
    assert interval(0.5, draws)[1:] == pytest.approx(np.quantile(draws, [0.025, 0.975]))
    assert not_worse(np.linspace(-0.03, 0.17, 1001))  # its 5% quantile is -0.02 + 0.01
    assert not not_worse(np.linspace(-0.031, 0.169, 1001) - 0.01)


def test_ranks_and_ties_follow_the_separated_pairs():
    """a and b are tied, b and c are tied, a is above c; d is below all."""
    spread = np.random.default_rng(2).normal(size=(4, 10_000)) * 0.01
    means = {"c": 0.66, "d": 0.2, "a": 0.72, "b": 0.69}
    draws = {name: value + one for (name, value), one in zip(means.items(), spread, strict=True)}
    found = order(means, draws)
    assert found.ranks == {"a": (1, 2), "b": (1, 3), "c": (2, 3), "d": (4, 4)}
    assert found.ties == [{"a", "b"}, {"b", "c"}, {"d"}]
    assert len(found.p_values) == 6
    assert all(pair == tuple(sorted(pair)) for pair in found.p_values)  # the better one first


def test_rank_correlations_are_spearmans():
    a, b = np.random.default_rng(4).normal(size=(2, 6, 50))
    expected = [spearmanr(x, y).statistic for x, y in zip(a.T, b.T, strict=True)]
    assert rank_correlations(a, b) == pytest.approx(expected, abs=1e-12)


def test_the_order_of_two_tables_is_compared_over_the_methods_and_seeds_of_both():
    generator = np.random.default_rng(5)

    def table(chances, seeds):
        def lines(chance):
            texts = ["".join(map(str, (generator.uniform(size=300) < chance).astype(int))) for _ in range(seeds)]
            return {seed: {"sealed": {"exact": text}} for seed, text in enumerate(texts)}

        runs = {name: lines(chance) for name, chance in chances.items()}
        return Table(SETUPS["sudoku-sft"], 1, runs, dict.fromkeys(runs), None, {})

    large = table({START: 0.1, "a": 0.2, "b": 0.5, "c": 0.8}, 3)
    for chances, expected in (((0.3, 0.6, 0.9), 1), ((0.9, 0.6, 0.3), -1), ((0.6, 0.3, 0.9), 0.5)):
        small = table({"other": 0.9, **dict(zip("abc", chances, strict=True))}, 8)
        assert order_kept(small, large) == pytest.approx((expected, expected, expected))
