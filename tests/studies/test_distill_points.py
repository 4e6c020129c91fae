"""AUP by hand, and the choice of rates and samplers."""

from __future__ import annotations

import math
from typing import Any

import pytest

from studies.distill.run import best_rate, chosen, for_goal
from studies.samplers.measure import area, aup


def sampler(right: int, passes: float, tokens: float = 20.0) -> dict[str, Any]:
    counts = {"passes": passes, "tokens": tokens, "computed": 100 / passes}
    return {"solved": "1" * right + "0" * (100 - right), **counts}


def test_aup_is_the_weighed_area_under_the_points() -> None:
    """One point: its rectangle. Equal accuracies: the area up to the fastest. A worse point counts less, and not at all
    more than 5 points below the slowest one."""
    assert area([(2.0, 80.0)], 80.0) == 160.0
    assert area([(4.0, 80.0), (2.0, 80.0)], 80.0) == pytest.approx(320.0)
    weight = math.exp(-3 * (1 - 76 / 80))
    assert area([(2.0, 80.0), (4.0, 76.0)], 80.0) == pytest.approx(160 + 2 * (80 + 76 * weight) / 2)
    assert area([(2.0, 80.0), (4.0, 74.9)], 80.0) == 160.0
    assert aup({"slow": sampler(80, 10), "fast": sampler(80, 5)}) == pytest.approx(320.0)


def test_rates_are_chosen_by_area_and_samplers_by_tokens_or_passes() -> None:
    lines = [
        {"method": "t3d", "rate": 1e-4, "samplers": {"a": sampler(80, 10), "b": sampler(79, 5)}},
        {"method": "t3d", "rate": 3e-4, "samplers": {"a": sampler(80, 10), "b": sampler(79, 2)}},
    ]
    assert best_rate(lines, {"t3d": (1e-4, 3e-4), "d-opsd": (1e-4,)}) == {"t3d": 3e-4}
    assert best_rate(lines[:1], {"t3d": (1e-4, 3e-4)}) == {}
    seeds = [{"validation": {"a": sampler(80, 10), "b": sampler(78, 5), "c": sampler(60, 1)}}] * 2
    assert chosen(seeds, 79.0, "passes") == chosen(seeds, 79.0) == "a"
    assert [chosen(seeds, 78.0, "passes"), chosen(seeds, 78.0)] == ["b", "a"]
    assert chosen(seeds, 90.0, "passes") == "a"


def test_the_goal_is_tried_with_the_most_accurate_sampler_that_is_cheap_enough() -> None:
    """A pass computes ten tokens here; the best undistilled sampler takes 8 passes, exact computes 160 tokens."""

    def line(**samplers: tuple[int, float]) -> dict[str, Any]:
        counts = {name: sampler(*of) | {"computed": 10 * of[1]} for name, of in samplers.items()}
        return {"validation": counts}

    start = [line(exact=(80, 16), fast=(79, 8), faster=(70, 2))] * 3
    own = [line(a=(95, 4.1), b=(90, 1.6), c=(85, 1.5), d=(99, 16))] * 3
    assert for_goal(start, {"t3d": own, "d-opsd": []}, "exact") == ("fast", "t3d", "b")
    assert for_goal(start, {"t3d": own, "dparallel": [line(e=(91, 1.0))]}, "exact") == ("fast", "dparallel", "e")
    assert for_goal(start, {"t3d": [line(a=(95, 4.1), b=(90, 1.7))]}, "exact") is None
    assert for_goal([line(exact=(80, 16), fast=(79, 3))], {"t3d": own}, "exact") == ("fast", "t3d", "c")
