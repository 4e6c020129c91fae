"""The tables of README.md, from data/runs.jsonl."""

from __future__ import annotations

from pathlib import Path
from statistics import fmean
from typing import Any

from d1.show.tables import markdown_table
from pocket.uncertainty import mean_of
from studies.causal_context.run import ARMS, BASES, RL, RUNS, runs, samplers
from studies.json_lines import read_lines
from studies.reports import percent, points
from studies.samplers.measure import outcomes

JUDGE = "exact 2"  # the sampler of the comparisons between arms
ARM_HEAD = ["attention", "arm", "solved, %", "minus base", "minus replay", "updates", "compute tokens", "processor s"]
SPEED_HEAD = ["arm", "sampler"]
SPEED_HEAD += [f"{attention}: {what}" for attention in BASES for what in ("tokens per pass", "solved, %")]
SPEED_HEAD += ["difference"]

Lines = list[dict[str, Any]]


def runs_of(lines: Lines, attention: str, arm: str) -> Lines:
    """Those of an arm, in the order of seeds."""
    own = [line for line in lines if (line["attention"], line["arm"]) == (attention, arm)]
    return sorted(own, key=lambda line: line["seed"])


def judged(lines: Lines, attention: str, arm: str, sampler: str) -> Lines:
    return [line["samplers"][sampler] for line in runs_of(lines, attention, arm)]


def arm_row(lines: Lines, attention: str, arm: str) -> list[str]:
    """Accuracy, differences in points and mean costs of an arm; a base has one seed, with which each is compared."""
    own, solved = runs_of(lines, attention, arm), outcomes(judged(lines, attention, arm, JUDGE))
    others = [other for other, where in (("base", ARMS[1:]), ("replay", ["JustGRPO"])) if arm in where]
    less = {of: points(mean_of(solved - outcomes(judged(lines, attention, of, JUDGE)))) for of in others}
    costs = [f"{fmean(line[name] for line in own):,.0f}" if arm in RL else "" for name in ("steps", "compute")]
    seconds = "" if arm == "base" else f"{fmean(line['processor_seconds'] for line in own):.0f}"
    return [attention, arm, percent(mean_of(solved)), less.get("base", ""), less.get("replay", ""), *costs, seconds]


def speed_row(lines: Lines, arm: str, sampler: str) -> list[str]:
    """Tokens per pass and accuracy with both kinds of attention, and the second minus the first."""
    found = {attention: judged(lines, attention, arm, sampler) for attention in BASES}
    cells = []
    for own in found.values():
        cells += [f"{fmean(one['tokens'] / one['passes'] for one in own):.2f}", percent(mean_of(outcomes(own)))]
    first, second = map(outcomes, found.values())
    return [arm, sampler, *cells, points(mean_of(second - first))]


def table(lines: Lines) -> str:
    if len(lines) < len(runs()):
        return f"{len(lines)} of {len(runs())} planned runs are done. Tables wait for all of them.\n"
    arms = [arm_row(lines, attention, arm) for attention in BASES for arm in ARMS]
    speeds = [speed_row(lines, arm, name) for arm in ARMS for name in samplers("block-causal", arm)]
    titles = ("## Arms, two tokens per step\n", "\n## Speeds\n")
    tables = markdown_table(ARM_HEAD, arms), markdown_table(SPEED_HEAD, speeds)
    return "\n".join(part for pair in zip(titles, tables, strict=True) for part in pair)


def parts() -> dict[Path, str]:
    """Page -> the part of it that is written."""
    return {Path(__file__).with_name("README.md"): table(read_lines(RUNS))}
