"""The test's table in docs/fast_rollouts.md and the trial's in README.md, from data/rollouts.jsonl."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from statistics import fmean
from typing import Any

import numpy as np
from scipy.stats import binomtest

from d1.show.tables import markdown_table
from pocket.recipes import ROOT
from pocket.uncertainty import mean_of
from studies.json_lines import read_lines
from studies.leaderboard.plan import accuracy
from studies.reports import Interval, holm, p_above, percent, points
from studies.samplers.rollouts import DATA, EXACT, STAGES, runs

PAGE = ROOT / "docs" / "fast_rollouts.md"
MARGIN, LEVEL = 0.02, 0.05
FAR = 0.08  # below the mean of the exact arm: the run collapsed
HEAD = ["arm", "seeds", "solved, % [95%]", "minus exact [95%]", "own sampler, %", "own minus solved [95%]"]
HEAD += ["collapsed [95%]", "updates", "per completion", "tokens, M", "times fewer tokens", "processor s"]
HEAD += ["times fewer seconds"]

Runs = Mapping[int, Mapping[str, Any]]  # the lines of an arm, by seed


def outcomes(arm: Runs, by: str = "exact") -> dict[int, np.ndarray]:
    """Seed -> (problems,), 1 where the model solves a problem with the sampler `by`."""
    return {seed: np.array([*map(float, line["right"][by])]) for seed, line in arm.items()}


def differences(arm: Runs, exact: Runs) -> np.ndarray:
    """(seeds, problems), the arm's outcomes minus those of exact, over the seeds that both have."""
    own, theirs = outcomes(arm), outcomes(exact)
    return np.stack([own[seed] - theirs[seed] for seed in sorted(own.keys() & theirs.keys())])


def collapsed(arm: Runs, exact: Runs) -> list[int]:
    """The seeds whose models solve less than the mean of the exact arm by more than `FAR`."""
    least = fmean(accuracy(line["right"]["exact"]) for line in exact.values()) - FAR
    return [seed for seed, line in sorted(arm.items()) if accuracy(line["right"]["exact"]) < least]


def share(count: int, of: int) -> Interval:
    """A share with its interval by Clopper and Pearson (1934)."""
    found = binomtest(count, of).proportion_ci(0.95, method="exact")
    return Interval(count / of, float(found.low), float(found.high))


def row(name: str, arm: Runs, exact: Runs) -> list[str]:
    mean = {key: fmean(line[key] for line in arm.values()) for key in ("compute", "processor_seconds")}
    theirs = {key: fmean(line[key] for line in exact.values()) for key in mean}
    bad = collapsed(arm, exact)
    solved = np.stack([*outcomes(arm).values()])
    by_own = ["", ""]
    if name != EXACT:
        own = np.stack([*outcomes(arm, "own").values()])
        by_own = [f"{100 * own.mean():.1f}", points(mean_of(own - solved))]
    return [
        *(name, str(len(arm)), percent(mean_of(solved))),
        "" if name == EXACT else points(mean_of(differences(arm, exact))),
        *(*by_own, f"{len(bad)}: {percent(share(len(bad), len(arm)))}%"),
        f"{fmean(line['steps'] for line in arm.values()):.0f}",
        f"{fmean(line['completion_tokens'] for line in arm.values()):.0f}",
        *(f"{mean['compute'] / 1e6:.2f}", f"{theirs['compute'] / mean['compute']:.2f}"),
        f"{mean['processor_seconds']:.1f}",
        f"{theirs['processor_seconds'] / mean['processor_seconds']:.2f}",
    ]


def verdicts(arms: Mapping[str, Runs]) -> str:
    """The confirmatory test: each fast arm against exact."""
    found = {name: p_above(differences(arm, arms[EXACT]), -MARGIN) for name, arm in arms.items() if name != EXACT}
    p_values = {name: p for name, p in found.items() if p is not None}
    said = []
    for name, p in zip(p_values, holm([*p_values.values()]), strict=True):
        verdict = "not worse than exact" if p < LEVEL else "a loss is not excluded"
        said.append(f"- `{name}`: {verdict} (margin {100 * MARGIN:g} points, one-sided, p {p:.2g} after Holm).")
    return "\n".join(said) + "\n"


def of_stage(stage: str) -> str:
    """The report of a stage, with arms that were removed since; only a complete stage has a verdict."""
    lines = [line for line in read_lines(DATA) if line["stage"] == stage]
    arms: dict[str, dict[int, Any]] = {name: {} for name in STAGES[stage].arms}
    for line in lines:
        arms.setdefault(line["arm"], {})[line["seed"]] = line
    planned, done = len(runs(stage)), sum(len(arms[name]) for name in STAGES[stage].arms)
    text = f"### {stage.capitalize()}, {STAGES[stage].split} problems\n\n"
    text += f"{done} of {planned} planned runs are done.\n"
    there = {name: arm for name, arm in arms.items() if arm and arms[EXACT].keys() & arm.keys()}
    if there:
        rows = [row(name, arm, arms[EXACT]) for name, arm in there.items()]
        text += f"\n{markdown_table(HEAD, rows)}"
    if stage == "test" and done == planned:
        text += f"\n{verdicts({name: arms[name] for name in STAGES[stage].arms})}"
    return text


def parts() -> dict[Path, str]:
    """Page -> the part of it that is written."""
    return {PAGE: of_stage("test")}
