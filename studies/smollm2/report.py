"""The tables of README.md, from data/runs.jsonl."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from d1.eval.uncertainty import wilson_interval
from d1.show.tables import markdown_table
from pocket.uncertainty import mean_of
from studies.json_lines import read_lines
from studies.reports import Interval, percent, points
from studies.smollm2.run import ARMS, DATA, RATES, SEEDS, Lines, best_rate, jobs

TWIN = "ar"


def outcomes(line: Mapping[str, Any], split: str) -> np.ndarray:
    """(1, problems): 1 where the run's model solves a problem of the split."""
    return np.array([[float(one) for one in line[split]["right"]]])


def share(runs: Sequence[Mapping[str, Any]], split: str) -> str:
    """The share of a split's problems that runs solve: Wilson's interval of one run, t over the seeds of several."""
    right = np.concatenate([outcomes(line, split) for line in runs])
    if len(runs) > 1:
        return percent(mean_of(right))
    value = float(right.mean())
    return percent(Interval(value, *wilson_interval(value, right.size)))


def conversion_table(lines: Lines) -> str:
    """What each conversion solves after SFT with seed 0, compared with the twin on the same problems."""
    twin = lines.get(f"sft-{TWIN}-0")
    rows = []
    for arm in ARMS:
        line = lines.get(f"sft-{arm}-0")
        if line is None:
            rows.append([arm, *[""] * 7, "not run"])
            continue
        cells = [arm]
        for split in ("validation", "test"):
            gap = ""
            if twin is not None and arm != TWIN:
                gap = points(mean_of(outcomes(line, split) - outcomes(twin, split)))
            cells += [share([line], split), gap]
        cells += [f"{line['bits']:.3f}", f"{line['seconds']:.0f}", f"{line['peak_gb']:.1f}", line["card"]]
        rows.append(cells)
    head = ["arm", "validation, % [95%]", "minus ar [95%]", "test, % [95%]", "minus ar [95%]", "bits per byte"]
    return markdown_table([*head, "seconds of SFT", "peak, GB", "card"], rows)


def runs_of_stages(lines: Lines) -> dict[str, list[Mapping[str, Any]]]:
    """Stage -> its runs that are done. Seed 0 of RL is the run of the search with the rate that was chosen."""
    arm = lines["base"]["arm"]
    chosen = []
    if all(f"rate-{rate:g}" in lines for rate in RATES):
        chosen = [lines[f"rate-{best_rate(lines):g}"]]

    def done(*names: str) -> list[Mapping[str, Any]]:
        return [lines[name] for name in names if name in lines]

    return {
        "as released, autoregressive": done("ar-base"),
        f"converted (`{arm}`)": done("base"),
        "+ SFT": done(f"sft-{arm}-0"),
        "+ SFT + RL": chosen + done(*(f"rl-{seed}" for seed in SEEDS)),
        "+ SFT + more SFT": done(*(f"more-{seed}" for seed in SEEDS)),
        "+ SFT + RL, shuffled rewards": done("shuffled"),
        "+ RL": done("rl-base"),
    }


def stages_table(lines: Lines) -> str:
    """What each stage solves, compared with the SFT that the later stages start from."""
    stages = runs_of_stages(lines)
    rows = []
    for stage, runs in stages.items():
        if not runs:
            rows.append([stage, "0", *[""] * 4])
            continue
        cells = [stage, str(len(runs))]
        for split in ("validation", "test"):
            gap = ""
            if stage != "+ SFT":
                right = np.concatenate([outcomes(line, split) for line in runs])
                gap = points(mean_of(right - outcomes(stages["+ SFT"][0], split)))
            cells += [share(runs, split), gap]
        rows.append(cells)
    head = ["stage", "runs", "validation, % [95%]", "minus SFT [95%]", "test, % [95%]", "minus SFT [95%]"]
    return markdown_table(head, rows)


def texts_table(lines: Lines) -> str:
    """The first completions of test problems, by arm."""
    rows = []
    for arm in ARMS:
        line = lines.get(f"sft-{arm}-0")
        if line is not None:
            rows.append([arm, *("`" + text.replace("\n", " / ") + "`" for text in line["test"]["texts"][:3])])
    return markdown_table(["arm", "problem 1", "problem 2", "problem 3"], rows)


def parts() -> dict[Path, str]:
    """Page -> the part of it that is written."""
    lines = {line["job"]: line for line in read_lines(DATA)}
    missing = [job.name for job in jobs() if job.name not in lines]
    text = f"{len(lines)} of {len(jobs())} jobs are done; missing: {', '.join(missing) or 'none'}.\n"
    text += f"\n## Conversion, seed 0\n\n{conversion_table(lines)}"
    if "base" in lines:
        text += f"\n## Stages\n\n{stages_table(lines)}"
    text += f"\n## Completions of the first test problems\n\n{texts_table(lines)}"
    return {Path(__file__).with_name("README.md"): text}
