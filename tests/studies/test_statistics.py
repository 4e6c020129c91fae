"""The studies' statistics, compared with sums written out, closed forms, a simulation, and Holm's rule by hand."""

import math
from statistics import fmean, stdev

import numpy as np
import pytest
from scipy.stats import t as student

from pocket.uncertainty import mean_of, variance_of_mean
from studies.reports import holm


def written_out(scores):
    """Mean squares of the crossed design, cell by cell."""
    seeds, problems = len(scores), len(scores[0])
    total = fmean(value for row in scores for value in row)
    seed_means = [fmean(row) for row in scores]
    problem_means = [fmean(row[p] for row in scores) for p in range(problems)]
    of_seeds = sum(problems * (mean - total) ** 2 for mean in seed_means) / (seeds - 1)
    of_problems = sum(seeds * (mean - total) ** 2 for mean in problem_means) / (problems - 1)
    rest = sum(
        (scores[s][p] - seed_means[s] - problem_means[p] + total) ** 2 for s in range(seeds) for p in range(problems)
    )
    return of_seeds, of_problems, rest / ((seeds - 1) * (problems - 1))


@pytest.mark.parametrize("bias", [0.0, 0.4])
def test_the_variance_is_that_of_seeds_and_problems(bias):
    generator = np.random.default_rng(3)
    chance = generator.uniform(size=40)
    scores = [
        [float(u < c + bias * s) for u, c in zip(generator.uniform(size=40), chance, strict=True)] for s in (0, 1)
    ]
    of_seeds, of_problems, rest = written_out(scores)
    assert of_problems > rest
    assert (of_seeds > rest) == bool(bias)
    parts = [(of_problems, 39), (of_seeds, 1), (-rest, 39)] if bias else [(of_problems, 39)]
    both = sum(square for square, _ in parts)
    variance, freedom = variance_of_mean(np.array(scores))
    assert variance == pytest.approx(both / 80, rel=1e-12)
    assert freedom == pytest.approx(both**2 / sum(square**2 / of for square, of in parts), rel=1e-12)
    found = mean_of(np.array(scores))
    assert found.value == pytest.approx(fmean(value for row in scores for value in row))
    assert found.high - found.value == pytest.approx(student.ppf(0.975, freedom) * math.sqrt(variance))


def test_of_one_seed_it_is_students_interval_over_problems():
    values = [0.0, 1.0, 1.0, 0.0, 1.0, 1.0, 1.0]
    found = mean_of(np.array([values]))
    error = stdev(values) / math.sqrt(7)
    assert found.high - found.value == pytest.approx(2.4469119 * error, rel=1e-6)  # t of 6 degrees, from a table
    assert mean_of(np.zeros((3, 5))) == (0, 0, 0, 1)
    with pytest.raises(ValueError, match="an interval needs at least two problems"):
        mean_of(np.ones((3, 1)))


@pytest.mark.parametrize("scale", [0.05, 1.0, 4.0])
def test_intervals_and_p_values_are_the_closed_forms_where_there_are_some(scale):
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


def test_an_interval_holds_the_true_mean_of_seeds_and_problems_as_often_as_it_says():
    generator = np.random.default_rng(0)
    held = 0
    for _ in range(400):
        seeds, problems = generator.normal(size=(3, 1)), generator.normal(size=(1, 60))
        found = mean_of(5.0 + 0.2 * seeds + problems + generator.normal(size=(3, 60)))
        held += found.low < 5.0 < found.high
    assert 0.93 < held / 400 <= 0.995


def test_holms_rule_by_hand():
    # 4 x .005, then 3 x .01, then 2 x .03, and .04, which may not fall below the one before it
    assert holm([0.01, 0.04, 0.03, 0.005]) == pytest.approx([0.03, 0.06, 0.06, 0.02])
    assert holm([0.9, 0.8]) == [1.0, 1.0]
    assert holm([]) == []
