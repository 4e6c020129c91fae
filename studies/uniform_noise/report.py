"""The tables of README.md, from data/search.jsonl and data/runs.jsonl."""

from __future__ import annotations

from pathlib import Path
from statistics import fmean
from typing import Any

from d1.show.tables import markdown_table
from pocket.uncertainty import mean_of
from studies.json_lines import read_lines
from studies.leaderboard.plan import accuracy
from studies.reports import gain, percent, points, scores
from studies.uniform_noise.run import ARMS, DATA, RATES, SEARCHED, runs

HEADER = ["arm", "seeds", "solved", "minus sft", "exact minus this arm", "solved as trained", "rollouts"]
HEADER += ["compute tokens", "processor s"]
UPDATES = ["arm", "largest ratio before an update", "and in second updates", "second updates: flipped passes, %"]
UPDATES += ["flipped positions, %", "clipped, %", "reward, first quarter", "last quarter"]


def as_trained(lines: list[dict[str, Any]]) -> list[dict[str, Any]]:
    return [{**line, "right": line["right_as_trained"]} for line in lines]


def difference(arm: str, other: str, lines: list[dict[str, Any]]) -> str:
    """`arm` minus `other` in points; the SFT model, which has one seed, is paired with each."""
    own, its = ([line for line in lines if line["arm"] == of] for of in (arm, other))
    if other != "sft":
        return gain(own, its)
    return points(mean_of(scores(own) - scores(its))) if own and its else ""


def row(arm: str, lines: list[dict[str, Any]]) -> list[str]:
    """Means over seeds; `rollouts` and `compute tokens` are those of a run."""
    own = [line for line in lines if line["arm"] == arm]
    cells = [arm, str(len(own)), percent(mean_of(scores(own)))]
    cells.append("" if arm == "sft" else difference(arm, "sft", lines))
    cells.append(difference("exact", arm, lines) if arm.startswith("surrogate") else "")
    cells.append(percent(mean_of(scores(as_trained(own)))))
    costs = [fmean(line.get(name, 0) for line in own) for name in ("rollouts", "compute", "seconds")]
    return [*cells, *(f"{cost:,.0f}" for cost in costs)]


def updates(arm: str, lines: list[dict[str, Any]]) -> list[str]:
    """First and second updates of each rollout, over all seeds: largest ratios, and mean shares in percent; then the
    mean reward of the first and of the last quarter of the rollouts."""
    curves = [line["curves"] for line in lines if line["arm"] == arm]
    firsts, seconds = (max(max(of["ratio_max"][start::2]) for of in curves) for start in (0, 1))
    names = ("accepted/flipped_passes", "accepted/flipped_positions", "clip_ratio/region_mean")
    shares = [[value for of in curves for value in of[name][1::2]] for name in names]
    cells = [arm, f"{firsts:.6f}", f"{seconds:.2f}", *(f"{100 * fmean(of):.2f}" if of else "" for of in shares)]
    rewards = [of["reward"] for of in curves]
    ends = ([of[: max(1, len(of) // 4)] for of in rewards], [of[-max(1, len(of) // 4) :] for of in rewards])
    return [*cells, *(f"{fmean(map(fmean, of)):.3f}" for of in ends)]


def table(search: list[dict[str, Any]], lines: list[dict[str, Any]]) -> str:
    told = f"{len(lines)} of {len(runs())} planned runs are done.\n"
    arms = [arm for arm in ARMS if any(line["arm"] == arm for line in lines)]
    if len(arms) < len(ARMS):
        return told
    rates = [
        [arm, *(f"{100 * fmean(found):.1f}" if found else "" for found in searched(arm, search))] for arm in SEARCHED
    ]
    parts = [markdown_table(HEADER, [row(arm, lines) for arm in arms])]
    parts.append(markdown_table(UPDATES, [updates(arm, lines) for arm in arms if arm != "sft"]))
    parts.append(markdown_table(["search: arm", *(f"rate {rate:g}" for rate in RATES)], rates))
    return "\n".join([told, *parts])


def searched(arm: str, search: list[dict[str, Any]]) -> list[list[float]]:
    """Per rate, the shares of validation problems solved."""
    own = [line for line in search if line["arm"] == arm]
    return [[accuracy(line["right"]) for line in own if line["rate"] == rate] for rate in RATES]


def parts() -> dict[Path, str]:
    """Page -> the part of it that is written."""
    files = (read_lines(DATA / f"{name}.jsonl") for name in ("search", "runs"))
    return {Path(__file__).with_name("README.md"): table(*files)}
