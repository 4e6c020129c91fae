"""The tables of README.md: what each stage of the demo and of `make smollm` solves; and docs/smollm2.md's times.

Pocket models: the means are those of three seeds (pocket/RESULTS.md), with the range in which a further run is
expected. It is the 95% prediction interval, mean +- t s sqrt(1 + 1/3), with the standard deviation s of the three seeds
(two degrees of freedom). For SFT, s is that of the seeds 0 to 7 (pocket/sft_seeds.jsonl; seven degrees of freedom), on
1,024 other problems of Sudoku, as many word problems, and the test problems of Countdown.

SmolLM2-135M: one run (smollm/svamp.jsonl), with Wilson's intervals, and t intervals of differences paired by problem.
smollm/stages.jsonl has the times in its logs: one per stage, and for RL one per two optimizer steps.
"""

from __future__ import annotations

import math
from pathlib import Path
from statistics import fmean, stdev

from scipy import stats

from d1.runs.tables import markdown_table
from pocket.recipes import ROOT
from studies.claims import pocket_rows
from studies.json_lines import read_lines
from studies.reports import paired_difference, percent, points, scores, share_of_one_run
from studies.training import accuracy

SEEDS = 3
# Task, lengths, and what the base solves of the test problems at each of them, in percent (greedy, so without seeds).
BASES = {"sudoku": {32: 27.3, 40: 23.8}, "countdown": {24: 22.9, 32: 25.1}, "arithmetic": {32: 37.9, 40: 39.3}}
EIGHT_SEEDS = ROOT / "pocket" / "sft_seeds.jsonl"
SMOLLM = ROOT / "smollm" / "svamp.jsonl"  # the results.jsonl of one run
STAGES = ROOT / "smollm" / "stages.jsonl"  # times of the same run
LAST_LOGS = 50  # the second half of RL, with a log per two optimizer steps: tests used the cores during the first half


def differences(task: str, length: int, name: str) -> list[float]:
    """A paired difference of pocket/RESULTS.md, per seed."""
    for row in pocket_rows(task):
        if row[:2] == [name, str(length)]:
            return [float(cell) for cell in row[2 : 2 + SEEDS]]
    raise ValueError(f"pocket/RESULTS.md has no {name} of {task} at {length}")


def solved(task: str, length: int) -> dict[str, list[float]]:
    """What each arm solves, in percent, per seed."""
    base = BASES[task][length]
    sft = [base + gain for gain in differences(task, length, "sft - base")]
    grpo = [base + gain for gain in differences(task, length, "grpo - base")]
    both = [start + gain for start, gain in zip(sft, differences(task, length, "sft_grpo - sft"), strict=True)]
    return {"sft": sft, "grpo": grpo, "sft_grpo": both}


def expected(values: list[float], spread: float, freedom: int) -> tuple[float, float]:
    """The 95% prediction interval of one further run, within 0 and 100."""
    half = stats.t.ppf(0.975, freedom) * spread * math.sqrt(1 + 1 / len(values))
    return max(0.0, fmean(values) - half), min(100.0, fmean(values) + half)


def pocket_table() -> str:
    of_eight: dict[str, list[float]] = {}
    for line in read_lines(EIGHT_SEEDS):
        of_eight.setdefault(line["task"], []).append(100 * accuracy(line["right"]))
    rows = []
    for task, bases in BASES.items():
        for length, base in bases.items():
            cells = [f"{task}, length {length}", f"{base:.1f}"]
            for arm, values in solved(task, length).items():
                spread, freedom = stdev(values), len(values) - 1
                if arm == "sft":
                    spread, freedom = stdev(of_eight[task]), len(of_eight[task]) - 1
                low, high = expected(values, spread, freedom)
                cells.append(f"{fmean(values):.1f} ({low:.0f} to {high:.0f})")
            rows.append(cells)
    head = ["solved, % of test problems", "base", "+ SFT", "+ diffu-GRPO", "+ SFT + diffu-GRPO (d1)"]
    return markdown_table(head, rows)


def smollm_table() -> str:
    """What each model of a run of `make smollm` solves, compared with the one that it was trained from."""
    rows = []
    before = None
    for line in read_lines(SMOLLM):
        right = scores([{**line, "seed": 0}])  # (1, problems)
        gain = ""
        if before is not None:
            gain = points(paired_difference(right - before))
        rows.append([line["model"], percent(share_of_one_run(right)), gain, f"{line['passes']:.1f}"])
        before = right
    head = ["SmolLM2-135M on SVAMP", f"solved, % of {right.size} test problems [95%]", "minus the row above [95%]"]
    return markdown_table([*head, "passes per completion"], rows)


def stages_table() -> str:
    """Hours and memory of the stages of the same run."""
    rows = []
    for line in read_lines(STAGES):
        seconds, memory = line.get("seconds"), line.get("peak_memory_gb")
        if seconds is None:
            seconds = line["steps"] * fmean(line["seconds_of_step"][-LAST_LOGS:])
        per_step = f"{seconds / line['steps']:.1f}" if "steps" in line else ""
        rows.append([f"`{line['stage']}`", per_step, f"{seconds / 3600:.2f}", f"{memory:.1f}" if memory else ""])
    return markdown_table(["stage", "seconds per optimizer step", "hours", "peak, GB"], rows)


def parts() -> dict[Path, str]:
    """Page -> the part of it that is written."""
    return {
        ROOT / "README.md": f"{pocket_table()}\n{smollm_table()}",
        ROOT / "docs" / "smollm2.md": stages_table(),
    }
