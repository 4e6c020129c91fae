"""The leaderboard's final table: p-values, ranks, duels, the order of tables; compared with SciPy and rules by hand."""

from dataclasses import replace
from itertools import combinations

import numpy as np
import pytest
from scipy.stats import spearmanr, ttest_1samp, ttest_rel

from studies.leaderboard.plan import FULL, SETUPS, START
from studies.leaderboard.tables import Table, duels, order, order_kept, outcomes, placed
from studies.reports import holm, p_above


def of_seeds(means, seeds=8, problems=10, spread=0.01):
    """Name -> (seeds, problems); all problems of a seed have the same score, so only the seeds vary."""
    noise = np.random.default_rng(2).normal(size=(len(means), seeds, 1)) * spread
    return {name: np.tile(mean + one, problems) for (name, mean), one in zip(means.items(), noise, strict=True)}


def test_p_values_are_those_of_paired_t_tests_after_holm():
    scores = of_seeds({"a": 0.72, "b": 0.71, "c": 0.70, "d": 0.69}, spread=0.015)
    names = sorted(scores, key=lambda name: -scores[name].mean())
    pairs = [*combinations(names, 2)]
    expected = holm([ttest_rel(scores[a][:, 0], scores[b][:, 0]).pvalue for a, b in pairs])
    found = order(scores).p_values
    assert found == pytest.approx(dict(zip(pairs, expected, strict=True)), rel=1e-6)
    assert 0 < sum(p < 0.05 for p in found.values()) < 6


def test_a_method_never_differs_from_its_copy_and_pairing_cancels_what_both_share():
    scores = np.random.default_rng(1).integers(0, 2, size=(8, 50))
    assert order({"a": scores, "b": scores}).p_values == {("a", "b"): 1.0}


def test_ranks_and_ties_follow_the_separated_pairs():
    """a and b are tied, b and c are tied, a is above c; d is below all."""
    scores = of_seeds({"c": 0.67, "d": 0.2, "a": 0.70, "b": 0.685}, spread=0.02)
    found = order(scores)
    assert found.ranks == {"a": (1, 2), "b": (1, 3), "c": (2, 3), "d": (4, 4)}
    assert found.ties == [{"a", "b"}, {"b", "c"}, {"d"}]
    assert len(found.p_values) == 6
    assert all(pair == tuple(sorted(pair)) for pair in found.p_values)  # the better one first


def test_four_seeds_are_not_tested():
    assert order(of_seeds({"a": 0.9, "b": 0.1}, seeds=4)) == ({}, {}, [])
    scores = of_seeds({"a": 0.9}, seeds=4)["a"]
    assert p_above(scores, 0.0) is None


def test_not_worse_is_the_one_sided_t_test():
    scores = of_seeds({"a": -0.01}, spread=0.02)["a"]
    expected = ttest_1samp(scores[:, 0], -0.02, alternative="greater").pvalue
    assert p_above(scores, -0.02) == pytest.approx(expected, rel=1e-6)


def table(chances, seeds):
    """A table of methods that solve a problem with these chances."""
    generator = np.random.default_rng(5)

    def lines(chance):
        texts = ["".join(map(str, (generator.uniform(size=300) < chance).astype(int))) for _ in range(seeds)]
        return {seed: {"sealed": {"exact": text}} for seed, text in enumerate(texts)}

    runs = {name: lines(chance) for name, chance in chances.items()}
    places, compared = placed(runs | {"d1": lines(0.5)} if "d1" not in runs else runs, replace(FULL, seeds=seeds), ())
    places = {name: place for name, place in places.items() if name in runs}
    return Table(SETUPS["sudoku-sft"], 1, runs, places, compared, {})


def test_the_order_of_two_tables_is_compared_over_the_methods_and_seeds_of_both():
    large = table({START: 0.1, "a": 0.2, "b": 0.5, "c": 0.8}, 3)
    for chances, expected in (((0.3, 0.6, 0.9), 1), ((0.9, 0.6, 0.3), -1), ((0.6, 0.3, 0.9), 0.5)):
        small = table({"other": 0.9, **dict(zip("abc", chances, strict=True))}, 8)
        assert order_kept(small, large) == pytest.approx((expected, expected, expected))
    close = table({START: 0.1, "a": 0.5, "b": 0.5, "c": 0.5}, 4)
    known = [small.places[name].solved.value for name in close.places if name != START]
    each = [
        spearmanr(
            known, [outcomes(close.runs[name], [seed]).mean() for name in close.places if name != START]
        ).statistic
        for seed in range(4)
    ]
    low, high = ttest_1samp(each, 0).confidence_interval()
    assert order_kept(small, close) == pytest.approx((np.mean(each), max(-1, low), min(1, high)))


def test_a_duel_of_three_seeds_is_not_tested_and_does_not_count_in_holms_correction():
    pair = table({"d1": 0.3, "quick-replay": 0.9}, 8)
    few = table({"d1": 0.3, "quick-replay": 0.9}, 3)
    tested, untested = duels([pair, few])
    assert tested.won
    assert (
        tested.difference.p
        == order({name: outcomes(pair.runs[name], range(8)) for name in pair.runs}).p_values["quick-replay", "d1"]
    )
    assert untested.difference.p is None
    assert not untested.won
