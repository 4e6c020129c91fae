"""The studies' statistics, compared with sums written out, closed forms, SciPy, and rules by hand."""

import math
from itertools import combinations

import numpy as np
import pytest
from scipy.optimize import minimize_scalar
from scipy.stats import beta, norm, ttest_1samp, ttest_rel
from scipy.stats import t as student

from pocket.uncertainty import half_width, mean_of, p_values
from studies.collapse.report import share
from studies.reports import gain, holm, paired_difference, points
from studies.samplers.measure import area, aup


def written_out(scores):
    """Mean squares of the crossed design: of seeds, of problems, and of what is left."""
    seeds, problems = scores.shape
    of_seeds, of_problems = (scores.mean(axis) - scores.mean() for axis in (1, 0))
    rest = scores - scores.mean() - of_seeds[:, None] - of_problems
    squares = problems * (of_seeds**2).sum(), seeds * (of_problems**2).sum(), (rest**2).sum()
    return squares[0] / (seeds - 1), squares[1] / (problems - 1), squares[2] / ((seeds - 1) * (problems - 1))


@pytest.mark.parametrize("seeds", [2, 3, 8])
def test_the_half_width_joins_the_part_of_seeds_and_that_of_problems(seeds):
    generator = np.random.default_rng(seeds)
    chance = generator.uniform(size=40) + 0.2 * generator.normal(size=(seeds, 1))
    scores = (generator.uniform(size=(seeds, 40)) < chance).astype(float)
    of_seeds, of_problems, rest = written_out(scores)
    assert of_problems > rest

    def half(level):
        ends = student.ppf((1 + level) / 2, seeds - 1), student.ppf((1 + level) / 2, 39)
        return math.sqrt((ends[0] ** 2 * of_seeds + ends[1] ** 2 * (of_problems - rest)) / scores.size)

    found, value = mean_of(scores), scores.mean()
    assert found[:3] == pytest.approx((value, value - half(0.95), value + half(0.95)))
    if seeds < 5:
        assert found.p is None
    else:
        assert half(1 - found.p) == pytest.approx(value, rel=1e-6)  # the interval ends at 0


@pytest.mark.parametrize("seeds", [3, 5, 8])
def test_without_a_share_of_the_problems_it_is_scipys_paired_t_test(seeds):
    """Problems that differ from each other only by noise that sums to zero in each seed have no share."""
    a, b = np.random.default_rng(seeds).normal(size=(2, seeds, 1)) + np.array([[[0.5]], [[0]]])
    noise = np.tile([1.0, -1.0], 10) * np.array([1, -1, *[0] * (seeds - 2)])[:, None]
    found, expected = mean_of(a + noise - b), ttest_rel(a[:, 0], b[:, 0])
    low, high = expected.confidence_interval(0.95)
    assert found[:3] == pytest.approx(((a - b).mean(), low, high))
    assert found.p == (pytest.approx(expected.pvalue, rel=1e-6) if seeds >= 5 else None)


def test_one_seed_is_judged_over_problems_and_equal_scores_have_no_width():
    values = np.random.default_rng(1).normal(size=12)
    low, high = ttest_1samp(values, 0).confidence_interval(0.95)
    assert mean_of(values[None]) == (pytest.approx(values.mean()), pytest.approx(low), pytest.approx(high), None)
    assert mean_of(np.zeros((5, 5))) == (0, 0, 0, 1)
    assert mean_of(np.ones((5, 5))) == (1, 1, 1, pytest.approx(0, abs=1e-30))
    with pytest.raises(ValueError, match="an interval needs at least two problems"):
        mean_of(np.ones((3, 1)))


def simulated(generator, count, seeds, problems, of_seed, of_problem):
    """(count, seeds, problems) tables with mean 0; deviations of seeds and problems as given, of the rest 1."""
    shapes = ((count, seeds, 1), of_seed), ((count, 1, problems), of_problem), ((count, seeds, problems), 1.0)
    return sum(deviation * generator.normal(size=shape) for shape, deviation in shapes)


# Deviations of seeds and problems as multiples of that of what is left.
@pytest.mark.parametrize("of_problem", [0.0, 0.3, 1.0])
@pytest.mark.parametrize("of_seed", [0.02, 0.1, 1.0])
@pytest.mark.parametrize("seeds", [3, 5])
def test_95_percent_of_the_intervals_contain_the_mean(seeds, of_seed, of_problem):
    """Where seeds vary most, 95%. Where they do not vary, up to 97.5%, because they then count what is left twice."""
    count = 4000
    scores = simulated(np.random.default_rng(0), count, seeds, 40, of_seed, of_problem)
    inside = (abs(scores.mean((1, 2))) <= half_width(scores, math.log(0.05))).mean()
    noise = 3 * math.sqrt(0.95 * 0.05 / count)
    assert 0.95 - noise < inside < (0.95 if of_seed == 1 and of_problem < 1 else 0.975) + noise


@pytest.mark.parametrize("of_seed", [0.1, 1.0])
def test_holms_family_wise_error_is_at_most_5_percent(of_seed):
    """Eight equal methods with eight seeds each: a family is wrong if any of its 28 pairs is separated. Seeds vary
    more in one method than in another, as on the board."""
    count, methods, seeds, problems = 1000, 8, 8, 20
    generator, pairs = np.random.default_rng(1), [*combinations(range(methods), 2)]
    spread = np.linspace(0.1, 2, methods)[:, None, None, None] * of_seed
    scores = simulated(generator, methods * count, seeds, problems, 0, 0.3)
    scores = scores.reshape(methods, count, seeds, problems)
    scores = scores + spread * generator.normal(size=(methods, count, seeds, 1))
    found = np.stack([p_values(scores[a] - scores[b]) for a, b in pairs], axis=1)  # (count, pairs)
    wrong = np.mean([min(holm(family)) < 0.05 for family in found])
    assert 0.005 < wrong <= 0.05 + 3 * math.sqrt(0.05 * 0.95 / count)


def test_holms_rule_by_hand():
    # 4 x .005, then 3 x .01, then 2 x .03, and .04, which may not fall below the one before it
    assert holm([0.01, 0.04, 0.03, 0.005]) == pytest.approx([0.03, 0.06, 0.06, 0.02])
    assert holm([0.9, 0.8]) == [1.0, 1.0]
    assert holm([]) == []
    # A comparison without any difference has no p-value, and does not raise those of the others.
    assert holm([0.5, math.nan, 0.001, 0.002, 0.003]) == holm([0.5, 1.0, 0.001, 0.002, 0.003])
    assert holm([math.nan]) == [1.0]


def test_a_gain_is_paired_by_the_seeds_that_both_have():
    own = [{"seed": 3, "right": "11"}, {"seed": 1, "right": "10"}, {"seed": 2, "right": "01"}]
    other = [{"seed": 1, "right": "01"}, {"seed": 4, "right": "11"}, {"seed": 3, "right": "01"}]
    assert gain(own, other) == points(mean_of(np.array([[1, -1], [1, 0]])))
    assert gain(own, other[1:2]) == ""


def test_shares_have_the_interval_of_clopper_and_pearson():
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


@pytest.mark.parametrize(
    ("wins", "losses", "problems"), [(2, 2, 300), (0, 0, 30), (30, 0, 30), (3, 15, 300), (60, 17, 300), (1, 0, 44)]
)
def test_the_interval_of_a_runs_difference_is_where_the_score_test_has_five_percent(wins, losses, problems):
    """The variance of the difference, under a difference that is given, is that of the most likely shares of wins and
    losses, which are searched for here."""
    gaps = np.zeros((1, problems))
    gaps[0, :wins], gaps[0, wins : wins + losses] = 1, -1

    def p_value(difference):
        def surprise(lost):
            shares = lost + difference, lost, 1 - difference - 2 * lost
            counts = wins, losses, problems - wins - losses
            return -sum(count * math.log(share) for count, share in zip(counts, shares, strict=True) if count)

        least, most = max(0, -difference), (1 - difference) / 2
        found = minimize_scalar(surprise, (least, most), (least, most), method="bounded", options={"xatol": 1e-12})
        deviation = math.sqrt((2 * found.x + difference - difference**2) / problems)
        return 2 * norm.sf(abs(gaps.mean() - difference) / deviation)

    found = paired_difference(gaps)
    assert found.value == gaps.mean()
    for end, edge in ((found.low, -1), (found.high, 1)):
        assert end == edge or p_value(end) == pytest.approx(0.05, abs=1e-4)
    assert paired_difference(-gaps) == pytest.approx((-found.value, -found.high, -found.low))


def test_models_that_agree_on_few_problems_are_not_equal():
    assert paired_difference(np.zeros((1, 30))).high > 0.1
    several = np.array([[0.0, 1, 0, -1], [1, 0, 0, 0]])
    assert paired_difference(several) == mean_of(several)
