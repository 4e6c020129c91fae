"""The uncertainty of a measured accuracy, and of a difference between two accuracies."""

from __future__ import annotations

import math

Z95 = 1.959963984540054  # the standard normal's 97.5% point


def wilson_interval(share: float, n: int) -> tuple[float, float]:
    """Wilson's 95% score interval of a share in [0, 1] seen in `n` problems (Wilson 1927).

    If each problem's result is itself a mean (cells of a puzzle, several samples), it varies less than a right/wrong
    result, and the interval is wider than necessary.
    """
    if n < 1 or not 0 <= share <= 1:
        raise ValueError(f"need a share in [0, 1] of at least one problem, got {share} of {n}")
    z = Z95
    centre = (share + z * z / (2 * n)) / (1 + z * z / n)
    half = z / (1 + z * z / n) * math.sqrt(share * (1 - share) / n + z * z / (4 * n * n))
    return max(0.0, centre - half), min(1.0, centre + half)


def sign_test(wins: int, losses: int) -> float:
    """Two-sided exact p-value of `wins` against `losses`, without ties (McNemar's exact test for right/wrong)."""
    n = wins + losses
    tail = sum(math.comb(n, k) for k in range(min(wins, losses) + 1))
    return min(1.0, 2 * tail / 2**n)


def pass_at_k(samples: int, right: int, k: int) -> float:
    """The probability that at least one of `k` of a problem's samples, drawn without replacement, is right (arXiv
    2107.03374, section 2.1). Its mean over draws of the samples is the probability that at least one of `k` new samples
    is right."""
    return 1 - math.comb(samples - right, k) / math.comb(samples, k)
