"""What a study of distillation chooses on validation problems: learning rates and samplers."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from studies.samplers import points

MARGIN = 1.0  # points of accuracy that count as no loss
FEWER = 10.0  # times fewer computed tokens than exact: the goal
Line = Mapping[str, Any]


def best_rate(lines: Sequence[Line], rates: Mapping[str, Sequence[float]]) -> dict[str, float]:
    """method -> of its learning rates the one with the highest AUP; only for methods whose `rates` were all tried."""
    best = {}
    for method, tried in rates.items():
        own = {line["rate"]: line["samplers"] for line in lines if line["method"] == method}
        if {*own} == {*tried}:
            highest = max(y for samplers in own.values() for _, y in points.points(samplers))
            best[method] = max(own, key=lambda rate: points.aup(own[rate], highest))
    return best


def mean_over(lines: Sequence[Line], split: str, name: str, value: str) -> float:
    """A sampler's accuracy, or its passes, tokens or computed tokens per problem: the mean of the seeds."""
    return points.mean_over([line[split][name] for line in lines], value)


def chosen(lines: Sequence[Line], least: float, fewest: str = "computed") -> str:
    """The sampler with the fewest computed tokens, or `passes`, among those that solve `least` percent of the
    validation problems in the mean of these lines (the seeds of one model); if there is none, the most accurate one."""
    names = [*lines[0]["validation"]]
    good = [name for name in names if mean_over(lines, "validation", name, "accuracy") >= least]
    if good:
        return min(good, key=lambda name: mean_over(lines, "validation", name, fewest))
    return max(names, key=lambda name: mean_over(lines, "validation", name, "accuracy"))


class Candidate(NamedTuple):
    """What is tried on the goal: a distilled model's sampler, against the best undistilled one."""

    slow: str
    method: str
    name: str


def for_goal(start: Sequence[Line], distilled: Mapping[str, Sequence[Line]], exact: str) -> Candidate | None:
    """The most accurate sampler of all distilled models that takes at most half the passes of the best undistilled one,
    and computes `FEWER` times fewer tokens than `exact`; None if there is none. The best undistilled sampler is the
    one with the fewest passes of those at most `MARGIN` points below `exact`.

    Args:
        start: lines of the undistilled model, one per seed.
        distilled: method -> lines, one per seed.
    """
    slow = chosen(start, mean_over(start, "validation", exact, "accuracy") - MARGIN, "passes")
    most = {"passes": mean_over(start, "validation", slow, "passes") / 2}
    most["computed"] = mean_over(start, "validation", exact, "computed") / FEWER
    found = [
        (mean_over(lines, "validation", name, "accuracy"), Candidate(slow, method, name))
        for method, lines in distilled.items()
        for name in (lines[0]["validation"] if lines else ())
        if all(mean_over(lines, "validation", name, of) <= limit for of, limit in most.items())
    ]
    return max(found)[1] if found else None
