"""What a study of distillation chooses on validation problems: learning rates and samplers."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from statistics import fmean
from typing import Any

from studies.samplers.points import accuracy, aup, points


def best_rate(lines: Sequence[Mapping[str, Any]], rates: Mapping[str, Sequence[float]]) -> dict[str, float]:
    """method -> of its learning rates the one with the highest AUP; only for methods whose `rates` were all tried."""
    best = {}
    for method, tried in rates.items():
        own = {line["rate"]: line["samplers"] for line in lines if line["method"] == method}
        if {*own} == {*tried}:
            highest = max(y for samplers in own.values() for _, y in points(samplers))
            best[method] = max(own, key=lambda rate: aup(own[rate], highest))
    return best


def mean_over(lines: Sequence[Mapping[str, Any]], split: str, name: str, value: str) -> float:
    """A sampler's accuracy, or its passes, tokens or computed tokens per problem: the mean of the seeds."""
    found = [line[split][name] for line in lines]
    return fmean(accuracy(one) if value == "accuracy" else one[value] for one in found)


def chosen(lines: Sequence[Mapping[str, Any]], least: float, fewest: str = "computed") -> str:
    """The sampler with the fewest computed tokens, or `passes`, among those that solve `least` percent of the
    validation problems in the mean of these lines (the seeds of one model); if there is none, the most accurate one."""
    names = [*lines[0]["validation"]]
    good = [name for name in names if mean_over(lines, "validation", name, "accuracy") >= least]
    if good:
        return min(good, key=lambda name: mean_over(lines, "validation", name, fewest))
    return max(names, key=lambda name: mean_over(lines, "validation", name, "accuracy"))
