"""What the reports of all studies share: outcomes of runs, significance of many differences, how intervals are written,
and the part of a page that a script writes."""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from scipy.optimize import brentq

from d1.eval.uncertainty import Z95, wilson_interval
from pocket.uncertainty import Mean, mean_of

BEGIN, END = "<!-- begin: written by `make studies` -->", "<!-- end -->"


class Interval(NamedTuple):
    """A value with its 95% interval."""

    value: float
    low: float
    high: float


def scores(lines: Iterable[Mapping[str, Any]]) -> np.ndarray:
    """(seeds, problems), 1 where a line's model solves a problem ("0110..."), in the order of seeds."""
    by_seed = sorted(lines, key=lambda line: line["seed"])
    return np.array([[float(one) for one in line["right"]] for line in by_seed])


def holm(p_values: Sequence[float]) -> list[float]:
    """Holm's adjusted p-values (1979): the smallest times their number, the next times one less, and so on, each at
    least as large as the one before. The probability that any value below 0.05 is a false discovery is at most 5%.
    SciPy's `false_discovery_control` controls the rate of false discoveries, which is a weaker claim.

    NaN counts as 1: `ttest_1samp` gives it where all differences are 0.
    """
    p_values = [1.0 if math.isnan(p) else p for p in p_values]
    adjusted, largest = [1.0] * len(p_values), 0.0
    for rank, index in enumerate(sorted(range(len(p_values)), key=lambda i: p_values[i])):
        largest = max(largest, min(1.0, (len(p_values) - rank) * p_values[index]))
        adjusted[index] = largest
    return adjusted


def p_above(scores: np.ndarray, least: float) -> float | None:
    """One-sided p-value of a table (seeds, problems) for the hypothesis that its mean is at most `least`; None if it is
    not tested."""
    found = mean_of(scores - least)
    return None if found.p is None else found.p / 2 if found.value > 0 else 1 - found.p / 2


def share_of_one_run(right: np.ndarray) -> Interval:
    """The share of the problems (1, problems) that one run solves, with Wilson's interval."""
    share = float(right.mean())
    return Interval(share, *wilson_interval(share, right.size))


def paired_difference(gaps: np.ndarray) -> Mean | Interval:
    """The mean of paired differences (seeds, problems), with its 95% interval.

    Several runs get the interval of `mean_of`. One run gets Tango's score interval if its differences are -1, 0 or 1,
    because Student's t interval is too narrow when few problems differ.
    """
    if len(gaps) > 1 or not np.isin(gaps, (-1, 0, 1)).all():
        return mean_of(gaps)
    wins, losses, problems = int((gaps > 0).sum()), int((gaps < 0).sum()), gaps.size
    value = (wins - losses) / problems
    return Interval(value, -score_limit(losses, wins, problems), score_limit(wins, losses, problems))


def score_limit(wins: int, losses: int, problems: int) -> float:
    """The upper limit of the 95% interval of a difference of paired shares: the difference at which the score statistic
    is the normal quantile (Tango 1998, Statistics in Medicine 17, equations 8 to 10)."""
    value = (wins - losses) / problems

    def excess(difference: float) -> float:
        # The share of losses that is most likely if the shares differ by this, a root of a x^2 + b x + c.
        a = 2 * problems
        b = (a - wins + losses) * difference - wins - losses
        c = -losses * difference * (1 - difference)
        lost = (math.sqrt(max(0.0, b * b - 4 * a * c)) - b) / (2 * a)
        variance = (2 * lost + difference * (1 - difference)) / problems
        return difference - value - Z95 * math.sqrt(max(0.0, variance))

    if value == 1:
        return 1.0
    return float(brentq(excess, value + 1e-12, 1.0))  # at `value` itself, the variance may be 0


def percent(mean: Mean | Interval) -> str:
    """A mean of shares in percent: "71.2 [68.0, 74.4]"."""
    low, high = max(0.0, mean.low), min(1.0, mean.high)
    return f"{100 * mean.value:.1f} [{100 * low:.1f}, {100 * high:.1f}]"


def points(mean: Mean | Interval) -> str:
    """A mean of differences of shares in points: "+3.1 [-0.2, +6.4]"."""
    return f"{100 * mean.value:+.1f} [{100 * mean.low:+.1f}, {100 * mean.high:+.1f}]"


def gain(own: Iterable[Mapping[str, Any]], other: Iterable[Mapping[str, Any]]) -> str:
    """What `own` solves minus what `other` does, in points, over the seeds that both have; "" if there is none."""
    by_seed = [{line["seed"]: line for line in lines} for lines in (own, other)]
    seeds = by_seed[0].keys() & by_seed[1].keys()
    ours, theirs = (scores(lines[seed] for seed in seeds) for lines in by_seed)
    return points(mean_of(ours - theirs)) if seeds else ""


def written_part(page: Path) -> str:
    """What `write_part` wrote into a page.

    Raises:
        ValueError: the page has no such part.
    """
    found = re.search(f"{re.escape(BEGIN)}\n\n(.*){re.escape(END)}", page.read_text(), re.DOTALL)
    if not found:
        raise ValueError(f"{page} has no part between {BEGIN} and {END}")
    return found[1]


def write_part(page: Path, text: str) -> None:
    """Replaces the part of a page that scripts write."""
    before = written_part(page)
    page.write_text(page.read_text().replace(f"{BEGIN}\n\n{before}", f"{BEGIN}\n\n{text}"))
