"""The accuracies of d1's arms on the pocket tasks: the report of one job, and the tables over tasks and seeds.

    for task in sudoku countdown; do for seed in 0 1 2; do make demo TASK=$task SEED=$seed; done; done
    python -m pocket.report                      # all of runs/demo
    python -m pocket.report runs/demo/block/seed0 runs/demo/block/seed1

`demo.py` writes the report of a single job. The tables skip jobs without results and show the number of seeds per row.
They need SciPy, which the extra `studies` installs.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np
from rich.console import Console

from d1.eval.files import read_setups
from d1.eval.scores import Row, compare, score_setup
from d1.runs.cli import run_script
from d1.runs.tables import markdown_table
from d1.show.report import draw
from d1.tasks import load_task
from pocket.recipes import RECIPES, ROOT

ARMS = {
    "base": "base",
    "sft": "+ SFT",
    "grpo": "+ diffu-GRPO",
    "sft_grpo": "+ SFT + diffu-GRPO (d1)",
    "shuffled": "control: diffu-GRPO, shuffled rewards",
}
FOUR_ARMS = (*ARMS,)[:4]
PAIRS = (("base", "sft"), ("base", "grpo"), ("sft", "sft_grpo"), ("grpo", "sft_grpo"), ("base", "shuffled"))
FINAL = "sft_grpo"  # the arm that `watch` shows next to the base


def demo_folder(task: str) -> Path:
    """The folder where `demo.py` puts the seeds of a task."""
    return ROOT / "runs" / "demo" / ("" if task == "sudoku" else task)


@dataclass(frozen=True)
class Job:
    """A folder of `demo.py`: the base's folder in pocket/, the arms evaluated at both lengths, and per arm and length
    the row of `d1.eval.scores` with the score of each problem."""

    folder: Path
    task: str
    base: str
    lengths: tuple[int, int]
    arms: list[str]
    scored: dict[tuple[str, int], tuple[Row, list[dict[str, Any]]]]

    def row(self, arm: str, length: int) -> Row:
        return self.scored[arm, length][0]

    def cell(self, arm: str, length: int) -> str:
        row = self.row(arm, length)
        return f"{row.accuracy:.1f} [{row.ci_low:.1f}, {row.ci_high:.1f}]"

    @property
    def name(self) -> str:
        return self.task if self.base == RECIPES[self.task].base else f"{self.task}, blocks"

    @property
    def pairs(self) -> list[tuple[str, str, int]]:
        """The comparisons, as (arm, other arm, length)."""
        return [(a, b, length) for (a, b), length in product(PAIRS, self.lengths) if {a, b} <= {*self.arms}]

    def compared(self, a: str, b: str, length: int) -> dict[str, Any]:
        """The paired difference of two arms, as `parse_and_get_acc.py --compare` computes it."""
        (first, of_first), (second, of_second) = self.scored[a, length], self.scored[b, length]
        return compare(first.setup, of_first, second.setup, of_second)


def job_of(folder: Path) -> Job:
    """Reads a job from the generation files in its folder.

    Raises:
        FileNotFoundError: the folder has no generations of a base model.
        ValueError: some problems of an arm have not been scored.
    """
    setups = read_setups(folder / "generations")
    scored = {}
    for setup in setups:
        row, details = score_setup(setup, "strict", {})
        if not row.complete:
            reasons = "; ".join(row.errors) or "problems are missing"
            raise ValueError(f"{folder}: {row.setup} is not complete: {reasons}")
        scored["base" if setup.model not in ARMS else setup.model, setup.gen_length] = row, details
    found = {(setup.task, setup.model) for setup in setups}
    for task, recipe in RECIPES.items():
        for base in (recipe.base, f"block_{recipe.base}"):
            if (recipe.task, base) in found:
                arms = [arm for arm in ARMS if all((arm, length) in scored for length in recipe.lengths)]
                return Job(folder, task, base, recipe.lengths, arms, scored)
    raise FileNotFoundError(f"{folder} has no generations of a pocket base model: run make demo")


def write_report(folder: Path, seconds: dict[str, float], console: Console) -> Path:
    """Writes table.json, curves.png, watch.html, watch.svg and report.md into `folder` and shows the table; returns
    the report's path."""
    job = job_of(folder)
    table = {row.setup: asdict(row) for row, _ in job.scored.values()}
    (folder / "table.json").write_text(json.dumps(table, indent=1) + "\n")
    rows = [[ARMS[arm], *(job.cell(arm, length) for length in job.lengths)] for arm in job.arms]
    shown = markdown_table(["solved, % [95% interval]", *(f"length {length}" for length in job.lengths)], rows)
    console.print(shown, markup=False)
    trained = [arm for arm in job.arms if arm not in ("base", "sft")]
    draw([folder / arm for arm in trained], [ARMS[arm] for arm in trained], folder / "curves.png")
    number, rule = shown_problem(job)
    watch(job, number)
    differences = []
    for a, b, length in job.pairs:
        found = job.compared(a, b, length)
        cells = [f"{found['difference']:+.1f}", f"{found['b_better']} / {found['a_better']}", f"{found['p_value']:.2g}"]
        differences.append([f"{b} - {a}, length {length}", *cells])
    path = folder / "report.md"
    path.write_text(f"""# d1 on the pocket model: {job.task}

Percent of {job.row("base", job.lengths[0]).n} test problems solved, greedy, with 95% intervals.

{shown}
## Differences, paired by problem

{markdown_table(["", "points", "problems better / worse", "exact sign test p"], differences)}
## Training

![Reward, accuracy, KL and length against rollouts](curves.png)

Thin: each logged value; bold: the mean of the last 5; dashed: validation problems, one sampled completion each. What RL
did, with animated completions:
{", ".join(f"[{ARMS[arm]}]({arm}/report.html)" for arm in trained)}.

## One problem, {ARMS["base"]} and {ARMS[FINAL]}

{rule}:

![The problem denoised by both models](watch.svg)

[The same as a web page](watch.html), which can be paused and shows the confidence of each token.

## Seconds per phase

{markdown_table(["phase", "seconds"], [[name, f"{value:.0f}"] for name, value in seconds.items()])}""")
    return path


def shown_problem(job: Job) -> tuple[int, str]:
    """The number, in the test split, of the problem to watch, and the rule by which it was chosen."""
    length = job.lengths[0]
    pairs = zip(*(job.scored[arm, length][1] for arm in ("base", FINAL)), strict=True)
    changed = [before["question"] for before, after in pairs if before["accuracy"] != after["accuracy"]]
    if not changed:
        return 0, f"The first test problem; at length {length} both solve the same ones"
    # An evaluation with a limit has only some of the problems.
    number = [*load_task(RECIPES[job.task].task).load_rows("test", None)["question"]].index(changed[0])
    return number, f"The first of these test problems that only one of the two solves, at length {length}"


def watch(job: Job, number: int) -> None:
    """Writes watch.html and watch.svg: a test problem, solved by the base and by the final model."""
    folder = job.folder.resolve()
    flags = ["--dataset", RECIPES[job.task].task, "--split", "test", "--index", number, "--gen_length", job.lengths[0]]
    flags += ["--block_length", 8, "--model_path", f"pocket/{job.base}", "--against", f"model_path={folder / FINAL}"]
    flags += ["--html", folder / "watch.html", "--svg", folder / "watch.svg"]
    command = [sys.executable, "-m", "d1", "watch", *map(str, flags)]
    subprocess.run(command, cwd=ROOT, stdout=subprocess.DEVNULL, check=True)


def spread(jobs: Sequence[Job], arm: str, length: int) -> tuple[float, float]:
    """Mean and standard deviation of an arm's accuracy over seeds; the deviation is 0 for one seed."""
    values = [job.row(arm, length).accuracy or 0.0 for job in jobs]
    return statistics.mean(values), statistics.stdev(values) if len(values) > 1 else 0.0


def tasks_table(tasks: Sequence[Sequence[Job]]) -> str:
    """One row per task and length, one column per arm: mean and standard deviation over seeds."""
    rows = []
    for jobs in tasks:
        for length in jobs[0].lengths:
            cells = ["{:.1f} ± {:.1f}".format(*spread(jobs, arm, length)) for arm in FOUR_ARMS]
            rows.append([f"{jobs[0].name}, length {length}", *cells, str(len(jobs))])
    return markdown_table(["solved, % of test problems", *(ARMS[arm] for arm in FOUR_ARMS), "seeds"], rows)


def seeds_table(jobs: Sequence[Job]) -> str:
    """Each arm's accuracy by seed."""
    rows = []
    for arm, length in product(jobs[0].arms, jobs[0].lengths):
        cells = [*(job.cell(arm, length) for job in jobs), *(f"{n:.1f}" for n in spread(jobs, arm, length))]
        rows.append([ARMS[arm], str(length), *cells])
    seeds = [job.folder.name for job in jobs]
    return markdown_table([f"{jobs[0].name}: solved, %", "length", *seeds, "mean", "sd"], rows)


def differences_table(jobs: Sequence[Job]) -> str:
    """Each seed's difference in points, paired by problem; their mean with its 95% interval, Student's t over seeds for
    these problems (of a single seed: over problems); the largest p of the seeds' exact sign tests; the number of seeds
    where the two arms' intervals do not overlap."""
    from scipy import stats  # which a single job does not need

    from pocket.uncertainty import mean_of

    def solved(job: Job, arm: str, length: int) -> np.ndarray:
        return np.array([one["accuracy"] for one in job.scored[arm, length][1]])

    rows = []
    for a, b, length in jobs[0].pairs:
        results = [job.compared(a, b, length) for job in jobs]
        gains = 100 * np.stack([solved(job, b, length) - solved(job, a, length) for job in jobs])  # (seeds, problems)
        mean, low, high, _ = mean_of(gains)
        if len(jobs) > 1:
            low, high = stats.ttest_1samp(gains.mean(1), 0).confidence_interval()
        apart = 0
        for job in jobs:
            first, second = job.row(a, length), job.row(b, length)
            is_above = (second.ci_low or 0) > (first.ci_high or 0)
            is_below = (second.ci_high or 0) < (first.ci_low or 0)
            apart += is_above or is_below
        cells = [f"{result['difference']:+.1f}" for result in results]
        cells += [f"{mean:+.1f} [{low:+.1f}, {high:+.1f}]", f"{max(r['p_value'] for r in results):.1g}"]
        rows.append([f"{b} - {a}", str(length), *cells, f"{apart}/{len(results)}"])
    header = [f"{jobs[0].name}: paired difference, points", "length", *(job.folder.name for job in jobs)]
    return markdown_table([*header, "mean [95% interval]", "largest p", "separated intervals"], rows)


def make_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folders", nargs="*", type=Path, help="folders of demo.py; default: all finished in runs/demo")
    return parser


def main(args: argparse.Namespace) -> None:
    by_base: dict[str, list[Job]] = {}
    finished = [path.parent for task in RECIPES for path in sorted(demo_folder(task).glob("seed*/report.md"))]
    for job in map(job_of, args.folders or finished):
        by_base.setdefault(job.base, []).append(job)
    if not by_base:
        raise FileNotFoundError("no finished job in runs/demo: run make demo, or make demo TASK=countdown")
    tasks = [*by_base.values()]
    tables = [tasks_table(tasks), *(table(jobs) for jobs in tasks for table in (seeds_table, differences_table))]
    sys.stdout.write("\n".join(tables))


if __name__ == "__main__":
    run_script("report.py", lambda: main(make_parser().parse_args()))
