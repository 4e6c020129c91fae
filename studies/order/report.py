"""The tables of README.md, from data/*.jsonl."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from statistics import fmean
from typing import Any

import numpy as np

from d1.show.tables import markdown_table
from pocket.uncertainty import Mean, mean_of
from studies.json_lines import read_lines
from studies.order.run import DATA, ORDERS, SEEDS, SETUPS, SPEEDS, STUDIED, best_rule, cell_of, levels_of, runs
from studies.reports import percent, points
from studies.samplers.measure import outcomes

NAMES = (*ORDERS, "random", "threshold")
Lines = list[dict[str, Any]]


def found(lines: Lines, setup: str, arm: str, speed: int, name: str) -> list[Mapping[str, Any]]:
    """What was judged under a name in an arm's runs, in the order of seeds; [] if a seed is missing."""
    own = [line for line in lines if (line["setup"], line["arm"], line["speed"]) == (setup, arm, speed)]
    own = sorted(own, key=lambda line: line["seed"])
    return [line["found"][name] for line in own] if len(own) == len(SEEDS) else []


def rule(lines: Lines, setup: str, speed: int, name: str) -> list[Mapping[str, Any]]:
    return found(lines, setup, "rules", 0, f"{name}, {speed}")


def best(setup: str, speed: int, schedule: bool) -> str:
    """The rule that solves most validation problems; `schedule`: without the rule threshold."""
    return best_rule(SETUPS[setup].task, speed, schedule).partition(",")[0]


def gain(lines: Lines, setup: str, schedule: bool = False) -> Mean:
    """The learned order minus the best rule, in the mean over the speeds."""
    tables = [
        outcomes(found(lines, setup, "order", speed, "order"))
        - outcomes(rule(lines, setup, speed, best(setup, speed, schedule)))
        for speed in SPEEDS
    ]
    return mean_of(np.mean(tables, 0))


def speeds(lines: Lines) -> str:
    """Each rule, and the learned order, at each speed."""
    rows = []
    for setup in STUDIED:
        for speed in SPEEDS:
            ours = found(lines, setup, "order", speed, "order")
            for name in (*NAMES, "learned"):
                own = rule(lines, setup, speed, name) if name != "learned" else ours
                if not own or not ours:
                    continue
                fast = fmean(one["tokens"] / one["passes"] for one in own)
                told = f"{name} {levels_of(SETUPS[setup].task)[speed]}" if name == "threshold" else name
                told += ", best of the search" * (name == best(setup, speed, schedule=False))
                less = points(mean_of(outcomes(ours) - outcomes(own))) if name != "learned" else ""
                rows.append([setup, str(speed), told, f"{fast:.2f}", percent(mean_of(outcomes(own))), less])
    head = ["setup", "schedule", "order", "tokens per pass", "solved, %", "learned minus this"]
    return markdown_table(head, rows) if rows else ""


def together(lines: Lines) -> str:
    """The arms that train the model, at the last speed."""
    rows, speed = [], SPEEDS[-1]
    for setup in STUDIED:
        control = found(lines, setup, "tokens", speed, "confidence")
        starts = rule(lines, setup, speed, "confidence")
        each = (("SFT", "confidence", starts), ("tokens", "confidence", control))
        joint = [("joint", name, found(lines, setup, "joint", speed, name)) for name in ("order", "confidence")]
        if not control or not starts or not all(own for _, _, own in joint):
            continue
        for arm, name, own in (*each, *joint):
            less = points(mean_of(outcomes(own) - outcomes(control))) if arm != "tokens" else ""
            seconds = [line["trained_s"] for line in lines if (line["setup"], line["arm"]) == (setup, arm)]
            spent = f"{fmean(seconds):.0f}" if seconds else ""
            judge = "learned" if name == "order" else name
            rows.append([setup, arm, judge, percent(mean_of(outcomes(own))), less, spent])
    head = ["setup", "trained", "judged by the order", "solved, %", "minus tokens", "processor s"]
    return markdown_table(head, rows) if rows else ""


def verdict(lines: Lines) -> str:
    """The decision of the protocol; "" as long as runs are missing."""
    if len(lines) < len(runs()):
        return ""
    gains = {setup: gain(lines, setup) for setup in STUDIED}
    kept = all(mean.low > 0 for mean in gains.values())
    told = [f"{setup} {points(mean)}" for setup, mean in gains.items()]
    less = [f"{setup} {points(gain(lines, setup, schedule=True))}" for setup in STUDIED]
    return (
        f"Learned order minus the best rule, mean over the speeds: {', '.join(told)}. By the protocol it is "
        f"**{'kept' if kept else 'not kept'}**.\n\nMinus the best rule with the same schedule (not decisive): "
        f"{', '.join(less)}.\n"
    )


def table(lines: Lines) -> str:
    parts = [f"{len(lines)} of {len(runs())} planned runs are done.\n"]
    if lines:
        cells = [f"{setup}: noise {noise:g}, rate {rate:g}" for setup in STUDIED for noise, rate in [cell_of(setup)]]
        parts.append(f"Chosen by the search: {'; '.join(cells)}.\n")
    return "\n".join(part for part in (*parts, verdict(lines), speeds(lines), together(lines)) if part)


def parts() -> dict[Path, str]:
    """Page -> the part of it that is written."""
    return {Path(__file__).with_name("README.md"): table(read_lines(DATA / "runs.jsonl"))}
