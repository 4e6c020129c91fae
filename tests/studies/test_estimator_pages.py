"""The estimator study's intervals, next to SciPy and simulations, and its pages."""

import numpy as np
import pytest
from scipy.stats import bootstrap, norm

from pocket.uncertainty import mean_of
from studies.estimators import report, run
from studies.estimators.choices import BY_KEY
from studies.estimators.report import difference, influences, mean_over, rank_correlation
from studies.leaderboard.plan import SETUPS, Setup


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


def test_95_percent_of_the_intervals_of_a_cosine_contain_it():
    """Three seeds with 16 problems each. Noise in both gradients lowers the cosine of 16 problems by .03."""
    rng, inside = np.random.default_rng(1), 0
    truth = np.mean([cosine(noisy(rng, 16)) for _ in range(4000)])
    for _ in range(400):
        seeds = [noisy(rng, 16) for _ in range(3)]
        found = mean_of(np.stack([influences(cosine(one), left_out(one, cosine)) for one in seeds]))
        inside += found.low <= truth <= found.high
    assert 0.9 < inside / 400 < 0.99


def line(seed, value, without, **more):
    return {"seed": seed, "x": value, "without": {"x": without}, **more}


def test_intervals_are_over_seeds_and_problems_and_differences_are_paired():
    own = {seed: line(seed, 2.0 + seed, [1.0 + seed, 3.0 + seed]) for seed in (1, 2)}  # influences 3, 1 and 4, 2
    found = mean_over(own, "x")
    assert found == mean_of(np.array([[4.0, 2.0], [5.0, 3.0]]))
    shifted = {seed: line(seed, 1.5 + seed, [0.5 + seed, 2.5 + seed]) for seed in (2, 3)}
    assert difference(own, shifted, "x")[:3] == (0.5, 0.5, 0.5)  # of seed 2
    assert difference(own, {}, "x") is None
    assert mean_over({1: line(1, None, [None, None])}, "x") is None


def test_a_rank_correlation_has_the_interval_of_bonett_and_wright():
    found = rank_correlation([1, 2, 3, 4, 5, 6], [2, 1, 4, 3, 6, 5])  # squared differences of ranks sum to 6
    value = 1 - 6 * 6 / (6 * 35)
    half = norm.ppf(0.975) * ((1 + value**2 / 2) / 3) ** 0.5
    assert found == pytest.approx((value, np.tanh(np.arctanh(value) - half), np.tanh(np.arctanh(value) + half)))
    rng, inside = np.random.default_rng(2), 0
    for _ in range(400):  # Spearman's rho of a normal pair with correlation .7
        x, y = rng.multivariate_normal([0, 0], [[1, 0.7], [0.7, 1]], size=12).T
        drawn = rank_correlation(x, y)
        inside += drawn.low <= 6 / np.pi * np.arcsin(0.35) <= drawn.high
    assert 0.91 < inside / 400 < 0.99
    assert rank_correlation([1, 2, 3, 4], [1, 2, 3, 4]) is None
    assert rank_correlation([1] * 6, range(6)) is None


# --- Pages ------------------------------------------------------------------------------------------------------------


def fake_lines(which, value):
    """Lines of `which` runs; all measures are `value(run)`, with some spread over problems."""
    common = {"bias_to_bound": 0.1, "bias_to_trajectory": 0.1, "deviation": 0.2, "cost": 0.5, "bound_error": 0.1}
    found = []
    for one in which:
        of = value(one)
        spread = [of + 0.001 * place for place in (-1, 0, 1)]
        measures = {"snr": of, "cosine_to_bound": of, "cosine_to_trajectory": of}
        found.append(one | common | measures | {"without": dict.fromkeys(measures, spread)})
    return found


def score_of(one):
    return 0.3 + 0.02 * [*BY_KEY].index((one["estimator"], one["views"])) + 0.0001 * one["seed"]


def test_a_page_of_a_part_says_how_much_is_there_and_separates_nothing():
    text = report.page(fake_lines([one for one in run.runs() if one["seed"] == 1][:30], score_of), {})
    assert "30 of 486 planned lines are measured, 1 of 18 models completely." in text
    assert "**" not in text
    assert "### countdown" not in text
    assert report.page([], {}) == report.status([])
    text = report.page(fake_lines(run.runs(), score_of), {})
    assert "486 of 486 planned lines are measured, 18 of 18 models completely.\n" in text
    assert "| one view: prompt visible, not hidden by .15 | **+0.02 [+0.02, +0.02]** |" in text
    assert "| replay, merged, 2 | 0.50 | 0.50 | 0.70 [0.70, 0.71] |" in text
    assert "predict the leaderboard" not in text


def test_an_estimator_counts_once_in_a_rank_correlation_with_the_leaderboard():
    """spg and stable-drl, cj-grpo and dipo have one estimator each: five are left."""
    methods = ["d1", "coupled-grpo", "spg", "stable-drl", "agrpo", "cj-grpo", "dipo"]
    study = report.study_of(fake_lines(run.runs(["sudoku"]), score_of))
    ends = dict(zip(methods, (0.1, 0.2, 0.9, 0.2, 0.6, 0.7, 0.7), strict=True))
    text = report.prediction(study, {SETUPS["sudoku-base"]: ends, SETUPS["countdown-sft"]: {}})
    expected = report.cell(rank_correlation([0, 1, 2, 3, 4], [0.1, 0.2, 0.55, 0.6, 0.7]), signed=True)
    assert f"| sudoku-base | 5 | {expected} | {expected} |  |  |" in text
    assert "countdown" not in text
    assert report.prediction(study, {Setup("sudoku", "base"): {}}) == ""
