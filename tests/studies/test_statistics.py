"""The studies' statistics, compared with sums written out, closed forms, SciPy, and rules by hand."""

import math
from statistics import fmean, stdev

import numpy as np
import pytest
from scipy.stats import beta, bootstrap, norm, ttest_1samp
from scipy.stats import t as student

from pocket.uncertainty import mean_of, variance_of_mean
from studies.estimators.report import difference, influences, mean_over, rank_correlation
from studies.reports import holm
from studies.samplers.measure import area, aup
from studies.samplers.rollouts_report import MARGIN, p_not_worse, share


def written_out(scores):
    """Mean squares of the crossed design: of seeds, of problems, and of what is left."""
    seeds, problems = scores.shape
    of_seeds, of_problems = (scores.mean(axis) - scores.mean() for axis in (1, 0))
    rest = scores - scores.mean() - of_seeds[:, None] - of_problems
    squares = problems * (of_seeds**2).sum(), seeds * (of_problems**2).sum(), (rest**2).sum()
    return squares[0] / (seeds - 1), squares[1] / (problems - 1), squares[2] / ((seeds - 1) * (problems - 1))


@pytest.mark.parametrize("bias", [0.0, 0.4])
def test_the_variance_is_that_of_seeds_and_problems(bias):
    generator = np.random.default_rng(3)
    chance = generator.uniform(size=40)
    scores = (generator.uniform(size=(2, 40)) < chance + bias * np.array([[0], [1]])).astype(float)
    of_seeds, of_problems, rest = written_out(scores)
    assert of_problems > rest
    assert (of_seeds > rest) == bool(bias)
    parts = [(of_problems, 39), (of_seeds, 1), (-rest, 39)] if bias else [(of_problems, 39)]
    both = sum(square for square, _ in parts)
    variance, freedom = variance_of_mean(scores)
    assert variance == pytest.approx(both / 80, rel=1e-12)
    assert freedom == pytest.approx(both**2 / sum(square**2 / of for square, of in parts), rel=1e-12)
    found = mean_of(scores)
    assert found.value == pytest.approx(scores.mean())
    assert found.high - found.value == pytest.approx(student.ppf(0.975, freedom) * math.sqrt(variance))


@pytest.mark.parametrize("scale", [0.05, 1.0, 4.0])
def test_intervals_and_p_values_of_one_seed_are_students_closed_forms(scale):
    """Student's distribution with 1, 2 and 4 degrees of freedom, its 97.5% points from a table."""
    tails = {
        1: (lambda t: 1 - 2 / math.pi * math.atan(t), 12.70620),
        2: (lambda t: 1 - t / math.sqrt(2 + t * t), 4.302653),
        4: (lambda t: 1 - t / math.sqrt(4 + t * t) * (1 + 2 / (4 + t * t)), 2.776445),
    }
    for freedom, (tail, quantile) in tails.items():
        values = scale + np.random.default_rng(freedom).normal(size=freedom + 1)
        error = stdev(values) / math.sqrt(len(values))
        found = mean_of(values[None])
        assert found.p == pytest.approx(tail(abs(fmean(values)) / error), rel=1e-9)
        assert found.high - found.value == pytest.approx(quantile * error, rel=1e-6)
    assert mean_of(np.zeros((3, 5))) == (0, 0, 0, 1)
    with pytest.raises(ValueError, match="an interval needs at least two problems"):
        mean_of(np.ones((3, 1)))


def test_holms_rule_by_hand():
    # 4 x .005, then 3 x .01, then 2 x .03, and .04, which may not fall below the one before it
    assert holm([0.01, 0.04, 0.03, 0.005]) == pytest.approx([0.03, 0.06, 0.06, 0.02])
    assert holm([0.9, 0.8]) == [1.0, 1.0]
    assert holm([]) == []


def test_differences_between_seeds_alone_are_judged_by_students_test_and_shares_by_clopper_and_pearson():
    rng = np.random.default_rng(0)
    for mean in (-0.03, 0.0, 0.05):
        of_seeds = mean + 0.03 * rng.standard_normal(20)
        expected = ttest_1samp(of_seeds, -MARGIN, alternative="greater").pvalue
        assert p_not_worse(np.tile(of_seeds[:, None], (1, 50))) == pytest.approx(expected, rel=1e-6)
    assert share(2, 24) == pytest.approx((2 / 24, beta.ppf(0.025, 2, 23), beta.ppf(0.975, 3, 22)))
    assert share(0, 20)[1:] == pytest.approx((0, 1 - 0.025 ** (1 / 20)))


def test_aup_is_the_weighed_area_under_the_points():
    """One point: its rectangle. Equal accuracies: the area up to the fastest. A worse point counts less, and not at all
    more than 5 points below the slowest one."""
    assert area([(2.0, 80.0)], 80.0) == 160.0
    assert area([(4.0, 80.0), (2.0, 80.0)], 80.0) == pytest.approx(320.0)
    weight = math.exp(-3 * (1 - 76 / 80))
    assert area([(2.0, 80.0), (4.0, 76.0)], 80.0) == pytest.approx(160 + 2 * (80 + 76 * weight) / 2)
    assert area([(2.0, 80.0), (4.0, 74.9)], 80.0) == 160.0
    found = {"solved": "1" * 80 + "0" * 20, "tokens": 20.0}
    assert aup({"slow": found | {"passes": 10}, "fast": found | {"passes": 5}}) == pytest.approx(320.0)


# --- Measures that are no means over problems -------------------------------------------------------------------------


def left_out(values, measure):
    return [measure(np.delete(values, place, axis=0)) for place in range(len(values))]


def cosine(pairs):
    """Of the mean gradients of (problems, 2, weights)."""
    a, b = pairs.mean(0)
    return float(a @ b / np.sqrt((a @ a) * (b @ b)))


def noisy(rng, problems):
    """Pairs of gradients whose means have the cosine .6."""
    means = np.array([[1.0, 0, 0], [0.6, 0.8, 0]])
    return means + rng.normal(size=(problems, 2, 3))


def test_the_influences_of_a_mean_are_its_values_and_those_of_a_cosine_have_the_error_of_scipys_bootstrap():
    rng = np.random.default_rng(0)
    values = rng.normal(size=7)
    np.testing.assert_allclose(influences(values.mean(), left_out(values, np.mean)), values)
    pairs = noisy(rng, 80)
    found = influences(cosine(pairs), left_out(pairs, cosine))
    assert found.mean() == pytest.approx(cosine(pairs))
    places = (np.arange(80),)
    drawn = bootstrap(places, lambda some: cosine(pairs[some]), n_resamples=600, vectorized=False, rng=rng)
    assert found.std(ddof=1) / 80**0.5 == pytest.approx(drawn.standard_error, rel=0.15)


def test_intervals_are_over_seeds_and_problems_and_differences_are_paired():
    def line(value, without):
        return {"x": value, "without": {"x": without}}

    own = {seed: line(2.0 + seed, [1.0 + seed, 3.0 + seed]) for seed in (1, 2)}  # influences 3, 1 and 4, 2
    assert mean_over(own, "x") == mean_of(np.array([[4.0, 2.0], [5.0, 3.0]]))
    shifted = {seed: line(1.5 + seed, [0.5 + seed, 2.5 + seed]) for seed in (2, 3)}
    assert difference(own, shifted, "x")[:3] == (0.5, 0.5, 0.5)  # of seed 2
    assert difference(own, {}, "x") is None
    assert mean_over({1: line(None, [None, None])}, "x") is None


def test_a_rank_correlation_has_the_interval_of_bonett_and_wright():
    found = rank_correlation([1, 2, 3, 4, 5, 6], [2, 1, 4, 3, 6, 5])  # squared differences of ranks sum to 6
    value = 1 - 6 * 6 / (6 * 35)
    half = norm.ppf(0.975) * ((1 + value**2 / 2) / 3) ** 0.5
    assert found == pytest.approx((value, np.tanh(np.arctanh(value) - half), np.tanh(np.arctanh(value) + half)))
    assert rank_correlation([1, 2, 3, 4], [1, 2, 3, 4]) is None
    assert rank_correlation([1] * 6, range(6)) is None
