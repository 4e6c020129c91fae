"""Intervals and tests against brute force."""

from __future__ import annotations

import itertools
import math

import pytest

from d1.eval.uncertainty import Z95, pass_at_k, sign_test, wilson_interval


@pytest.mark.parametrize(("right", "n"), [(0, 1), (1, 1), (0, 20), (3, 20), (10, 20), (20, 20), (783, 1130)])
def test_wilson_ends_are_where_the_score_test_turns(right, n):
    """The interval holds exactly the p for which |share - p| <= z sqrt(p (1 - p) / n)."""
    share = right / n
    low, high = wilson_interval(share, n)

    def inside(p):
        return abs(share - p) <= Z95 * math.sqrt(p * (1 - p) / n) + 1e-12

    assert inside(low)
    assert inside(high)
    assert low == 0 or not inside(low - 1e-6)
    assert high == 1 or not inside(high + 1e-6)


@pytest.mark.parametrize(("wins", "losses"), [(0, 0), (1, 0), (5, 0), (3, 2), (2, 7), (6, 6)])
def test_sign_test_counts_every_outcome(wins, losses):
    """p is the share of all 2^n sign patterns at least as lopsided as the one seen."""
    n = wins + losses
    lopsided = [abs(2 * sum(signs) - n) >= abs(wins - losses) for signs in itertools.product((0, 1), repeat=n)]
    assert sign_test(wins, losses) == pytest.approx(sum(lopsided) / len(lopsided), abs=1e-12)


@pytest.mark.parametrize(("samples", "right"), [(1, 1), (4, 0), (5, 2), (6, 5), (7, 7)])
def test_pass_at_k_is_the_share_of_subsets_with_a_right_sample(samples, right):
    outcomes = [True] * right + [False] * (samples - right)
    for k in range(1, samples + 1):
        subsets = [*itertools.combinations(outcomes, k)]
        assert pass_at_k(samples, right, k) == pytest.approx(sum(map(any, subsets)) / len(subsets), abs=1e-12)
