"""The tables of README.md, from data/runs.jsonl."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

from d1.show.tables import markdown_table
from pocket.uncertainty import mean_of
from studies.json_lines import read_lines
from studies.reports import percent, points
from studies.smollm2.run import ARMS, DATA, jobs

TWIN = "ar"


def outcomes(line: Mapping[str, Any], split: str) -> np.ndarray:
    """(1, problems): 1 where the run's model solves a problem of the split."""
    return np.array([[float(one) for one in line[split]["right"]]])


def conversion_table(lines: Mapping[str, Mapping[str, Any]]) -> str:
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
            cells += [percent(mean_of(outcomes(line, split))), gap]
        cells += [f"{line['bits']:.3f}", f"{line['seconds']:.0f}", f"{line['peak_gb']:.1f}", line["card"]]
        rows.append(cells)
    head = ["arm", "validation, % [95%]", "minus ar [95%]", "test, % [95%]", "minus ar [95%]", "bits per byte"]
    return markdown_table([*head, "seconds of SFT", "peak, GB", "card"], rows)


def texts_table(lines: Mapping[str, Mapping[str, Any]]) -> str:
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
    text += f"\n## Completions of the first test problems\n\n{texts_table(lines)}"
    return {Path(__file__).with_name("README.md"): text}
