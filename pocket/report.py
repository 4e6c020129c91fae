"""What d1's arms reach on every pocket task: the report of one job, and the tables over tasks and seeds.

    for task in sudoku countdown; do for seed in 0 1 2; do make demo TASK=$task SEED=$seed; done; done
    python -m pocket.report                      # all of runs/demo; the figure goes to pocket/figures/tasks.png
    python -m pocket.report runs/demo/block/seed0 runs/demo/block/seed1

`demo.py` writes the report of a single job. The tables leave out jobs without results and say how many seeds a row has.
They need SciPy, which the extra `studies` installs.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np
from rich.console import Console

from d1.runs.entry import run_script
from d1.show.curves import panels, save_figure
from d1.show.tables import markdown_table
from d1.tasks import load_task
from pocket.recipes import RECIPES, ROOT, Recipe

ARMS = {
    "base": "base",
    "sft": "+ SFT",
    "grpo": "+ diffu-GRPO",
    "sft_grpo": "+ SFT + diffu-GRPO (d1)",
    "shuffled": "control: diffu-GRPO, shuffled rewards",
}
FOUR_ARMS = (*ARMS,)[:4]
COLOURS = dict(zip(FOUR_ARMS, ("#9e9e9e", "#4c9be8", "#f0a030", "#2e8b57"), strict=True))
PAIRS = (("base", "sft"), ("base", "grpo"), ("sft", "sft_grpo"), ("grpo", "sft_grpo"), ("base", "shuffled"))
FINAL = "sft_grpo"  # what `watch` shows next to the base
EXAMPLES = 10


def demo_folder(task: str) -> Path:
    """Where `demo.py` puts the seeds of a task."""
    return ROOT / "runs" / "demo" / ("" if task == "sudoku" else task)


@dataclass(frozen=True)
class Job:
    """A folder of `demo.py` with its generations: the task, the base's folder in pocket/, and the problems' split."""

    folder: Path
    task: str
    base: str
    split: str = "test"

    @property
    def recipe(self) -> Recipe:
        return RECIPES[self.task]

    def setup(self, arm: str, length: int) -> str:
        """What the generation files of an arm at a length are called; the base goes by its own name."""
        split = "" if self.split == "test" else f"_{self.split}"
        return f"{self.recipe.task}_{self.base if arm == 'base' else arm}{split}_{length}_{length // 2}"

    def file(self, arm: str, length: int) -> Path:
        return self.folder / "generations" / f"{self.setup(arm, length)}_0_generations.json"

    def answers(self, arm: str, length: int) -> list[dict[str, Any]]:
        """An arm's completions with their problems, in the order of the split."""
        return sorted(json.loads(self.file(arm, length).read_text())["generations"], key=lambda one: one["index"])

    @property
    def arms(self) -> list[str]:
        """The arms that have been evaluated at both lengths."""
        return [arm for arm in ARMS if all(self.file(arm, length).exists() for length in self.recipe.lengths)]


def job_of(folder: Path, split: str = "test") -> Job:
    """The job in a folder, by the names of its generation files.

    Raises:
        FileNotFoundError: it has no generations of a base.
    """
    for task, recipe in RECIPES.items():
        for base in (recipe.base, f"block_{recipe.base}"):
            if any((folder / "generations").glob(f"{recipe.task}_{base}_*_generations.json")):
                return Job(folder, task, base, split)
    raise FileNotFoundError(f"{folder} has no generations of a pocket base: make demo")


def parse(job: Job, *flags: str) -> Any:
    """JSON output of `parse_and_get_acc.py` on a job's generations."""
    generations = job.folder.resolve() / "generations"
    command = [sys.executable, "parse_and_get_acc.py", str(generations), "--format", "json", *flags]
    done = subprocess.run(command, cwd=ROOT / "eval", capture_output=True, text=True, check=False)
    if done.returncode:
        raise RuntimeError(f"{' '.join(command)} failed:\n{done.stderr[-2000:]}")
    return json.loads(done.stdout)


def accuracies(job: Job) -> dict[str, dict[str, Any]]:
    """The parser's row of every setup, by its name."""
    return {row["setup"]: row for row in parse(job)}


def pairs_of(job: Job) -> list[tuple[tuple[str, str], int]]:
    """(two arms, length) of each comparison."""
    arms = job.arms
    return [*product([pair for pair in PAIRS if {*pair} <= {*arms}], job.recipe.lengths)]


def cell(row: dict[str, Any]) -> str:
    return f"{row['accuracy']:.1f} [{row['ci_low']:.1f}, {row['ci_high']:.1f}]"


def write_report(folder: Path, seconds: dict[str, float], console: Console, split: str = "test") -> Path:
    """Writes table.json, curves.png, watch.html, watch.svg and report.md into `folder` and shows the table; returns
    the report's path."""
    job = job_of(folder, split)
    table, arms, lengths = accuracies(job), job.arms, job.recipe.lengths
    (folder / "table.json").write_text(json.dumps(table, indent=1) + "\n")
    rows = [[ARMS[arm], *(cell(table[job.setup(arm, length)]) for length in lengths)] for arm in arms]
    shown = markdown_table(["solved, % [95% interval]", *(f"length {length}" for length in lengths)], rows)
    console.print(shown, markup=False)
    trained = [arm for arm in arms if arm not in ("base", "sft")]
    runs, labels = [str(folder / arm) for arm in trained], [ARMS[arm] for arm in trained]
    curves = [sys.executable, "plot_curves.py", *runs, "--labels", *labels, "--output", str(folder / "curves.png")]
    subprocess.run(curves, cwd=ROOT / "diffu-grpo", check=True)
    watch(job)
    differences = []
    for (a, b), length in pairs_of(job):
        found = parse(job, "--compare", job.setup(a, length), job.setup(b, length))
        cells = [f"{found['difference']:+.1f}", f"{found['b_better']} / {found['a_better']}", f"{found['p_value']:.2g}"]
        differences.append([f"{b} - {a}, length {length}", *cells])
    text = f"""# d1 on the pocket model: {job.task}

Solved, in percent of {table[job.setup("base", lengths[0])]["n"]} {split} problems, greedy, with 95% intervals.

{shown}
## Differences, paired by problem

{markdown_table(["", "points", "problems better / worse", "exact sign test p"], differences)}
## Training

![Reward, accuracy, KL and length against rollouts](curves.png)

Dashed: validation problems, one sampled completion each. What RL did, with completions that play:
{", ".join(f"[{ARMS[arm]}]({arm}/report.html)" for arm in trained)}.

## One problem, {ARMS["base"]} and {ARMS[FINAL]}

![The problem denoised by both](watch.svg)

[The same as a page](watch.html) plays, stops, and says how sure each token was.

## Ten problems

{examples(job)}
## Seconds per phase

{markdown_table(["phase", "seconds"], [[name, f"{value:.0f}"] for name, value in seconds.items()])}"""
    path = folder / "report.md"
    path.write_text(text)
    return path


def watch(job: Job) -> None:
    """Writes watch.html and watch.svg: the first validation problem, before and after everything."""
    command = [sys.executable, "-m", "d1", "watch", "--dataset", job.recipe.task, "--split", "validation"]
    command += ["--gen_length", str(job.recipe.lengths[0]), "--block_length", "8"]
    command += ["--model_path", f"pocket/{job.base}", "--against", f"model_path={job.folder.resolve() / FINAL}"]
    for kind in ("html", "svg"):
        command += [f"--{kind}", str(job.folder.resolve() / f"watch.{kind}")]
    subprocess.run(command, cwd=ROOT, stdout=subprocess.DEVNULL, check=True)


def examples(job: Job) -> str:
    """What each model answered to the first problems, at the longer length; right answers in bold."""
    module, arms = load_task(job.recipe.task), job.arms
    rows = []
    for problem in zip(*(job.answers(arm, job.recipe.lengths[-1])[:EXAMPLES] for arm in arms), strict=True):
        right = [module.score(one["generations"], one)["accuracy"] for one in problem]
        answers = [str(module.extract(one["generations"]) or "none").replace("*", r"\*") for one in problem]
        marked = [f"**{answer}**" if good else answer for answer, good in zip(answers, right, strict=True)]
        rows.append([problem[0]["question"].strip().replace("\n", " "), *marked])
    return markdown_table(["problem", *arms], rows)


def finished() -> list[Path]:
    """The folders of runs/demo whose four arms have all been evaluated, task by task and seed by seed."""
    folders = [folder for task in RECIPES for folder in sorted(demo_folder(task).glob("seed*"))]
    return [folder for folder in folders if (folder / "table.json").exists() and {*FOUR_ARMS} <= {*job_of(folder).arms}]


class Seeds:
    """The jobs of one task and base, one per seed, with the parser's table of each."""

    def __init__(self, jobs: Sequence[Job]) -> None:
        self.jobs, self.tables = jobs, [accuracies(job) for job in jobs]
        self.task, self.lengths = jobs[0].task, jobs[0].recipe.lengths
        self.name = jobs[0].task if jobs[0].base == jobs[0].recipe.base else f"{jobs[0].task}, blocks"
        self.names = [job.folder.name for job in jobs]

    def rows(self, arm: str, length: int) -> list[dict[str, Any]]:
        """An arm's row in each seed's table."""
        return [table[job.setup(arm, length)] for job, table in zip(self.jobs, self.tables, strict=True)]

    def spread(self, arm: str, length: int) -> tuple[float, float]:
        """Mean and standard deviation over seeds of an arm's accuracy; the latter is 0 for one seed."""
        values = [row["accuracy"] for row in self.rows(arm, length)]
        return statistics.mean(values), statistics.stdev(values) if len(values) > 1 else 0.0


def tasks_table(tasks: Sequence[Seeds]) -> str:
    """Tasks and lengths x four arms, mean and standard deviation over seeds."""
    rows = []
    for found in tasks:
        for length in found.lengths:
            cells = ["{:.1f} ± {:.1f}".format(*found.spread(arm, length)) for arm in FOUR_ARMS]
            rows.append([f"{found.name}, length {length}", *cells, str(len(found.jobs))])
    return markdown_table(["solved, % of test problems", *(ARMS[arm] for arm in FOUR_ARMS), "seeds"], rows)


def seeds_table(found: Seeds) -> str:
    """Each arm's accuracy by seed, and the tokens that one of its completions feeds through the model (mean)."""
    rows = []
    for arm, length in product(found.jobs[0].arms, found.lengths):
        cells = [*map(cell, found.rows(arm, length)), *(f"{value:.1f}" for value in found.spread(arm, length))]
        fed = statistics.mean(one["forward_tokens"] for job in found.jobs for one in job.answers(arm, length))
        rows.append([ARMS[arm], str(length), *cells, f"{fed:.0f}"])
    header = [f"{found.name}: solved, %", "length", *found.names, "mean", "sd", "tokens per completion"]
    return markdown_table(header, rows)


def differences_table(found: Seeds) -> str:
    """Paired by problem, each seed's difference in points; their mean with its 95% interval over seeds and problems;
    the largest p of the seeds' exact sign tests; in how many seeds the two arms' own intervals do not touch."""
    from pocket.uncertainty import mean_of  # SciPy, which a single job does not need

    def solved(job: Job, arm: str, length: int) -> np.ndarray:
        score = load_task(job.recipe.task).score
        return np.array([score(one["text"], one)["accuracy"] for one in job.answers(arm, length)])

    rows = []
    for (a, b), length in pairs_of(found.jobs[0]):
        results = [parse(job, "--compare", job.setup(a, length), job.setup(b, length)) for job in found.jobs]
        gains = np.stack([solved(job, b, length) - solved(job, a, length) for job in found.jobs])
        mean = mean_of(100 * gains)
        both = zip(found.rows(a, length), found.rows(b, length), strict=True)
        apart = sum(second["ci_low"] > first["ci_high"] for first, second in both)
        cells = [f"{result['difference']:+.1f}" for result in results]
        cells += [f"{mean.value:+.1f} [{mean.low:+.1f}, {mean.high:+.1f}]", f"{max(r['p_value'] for r in results):.1g}"]
        rows.append([f"{b} - {a}", str(length), *cells, f"{apart}/{len(results)}"])
    header = [f"{found.name}: paired difference, points", "length", *found.names, "mean [95% interval]"]
    return markdown_table([*header, "largest p", "intervals apart"], rows)


def draw(tasks: Sequence[Seeds], path: Path) -> None:
    """Bars of each arm at two lengths, one panel per task, with the standard deviation over seeds."""
    figure, axes = panels(1, len(tasks), size=(4 * len(tasks), 3.6), share_y=True)
    for axis, found in zip(axes, tasks, strict=True):
        for at, arm in enumerate(FOUR_ARMS):
            means, deviations = zip(*(found.spread(arm, length) for length in found.lengths), strict=True)
            places = [group + 0.2 * (at - 1.5) for group in range(len(found.lengths))]
            axis.bar(places, means, 0.19, yerr=deviations, capsize=2, label=ARMS[arm], color=COLOURS[arm])
        axis.set(title=found.name, ylim=(0, 100))
        axis.set_xticks(range(len(found.lengths)), [f"length {length}" for length in found.lengths])
    axes[0].set_ylabel("solved, % of test problems")
    figure.legend(*axes[0].get_legend_handles_labels(), loc="outside upper center", ncols=2, fontsize="small")
    save_figure(figure, path)


def make_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folders", nargs="*", type=Path, help="jobs of demo.py; default: all finished of runs/demo")
    parser.add_argument("--figure", type=Path, help="default: pocket/figures/tasks.png; with folders none")
    return parser


def main(args: argparse.Namespace) -> None:
    by_base: dict[str, list[Job]] = {}
    for job in map(job_of, args.folders or finished()):
        by_base.setdefault(job.base, []).append(job)
    if not by_base:
        raise FileNotFoundError("no finished job in runs/demo: make demo, make demo TASK=countdown")
    tasks = [*map(Seeds, by_base.values())]
    figure = args.figure or (None if args.folders else ROOT / "pocket" / "figures" / "tasks.png")
    if figure:
        draw(tasks, figure)
    tables = [tasks_table(tasks), *(table(found) for found in tasks for table in (seeds_table, differences_table))]
    sys.stdout.write("\n".join(tables))


if __name__ == "__main__":
    run_script("report.py", lambda: main(make_parser().parse_args()))
