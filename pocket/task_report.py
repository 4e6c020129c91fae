"""What d1's four arms reach on every pocket task: one job's report, and the table and figure over tasks and seeds.

    for task in sudoku countdown; do for seed in 0 1 2; do make demo TASK=$task SEED=$seed; done; done
    python -m pocket.task_report                    # the tables; the figure goes to pocket/figures/tasks.png

A job without results is left out, and the table says how many seeds a row stands on.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
from collections.abc import Sequence
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np
from rich.console import Console

from d1.runs.entry import run_script
from d1.show.curves import panels, save_figure
from d1.show.tables import markdown_table
from d1.tasks import load_task
from pocket.recipes import RECIPES, ROOT
from pocket.report import ARMS, EXAMPLES, PAIRS, accuracies, cell, parse
from studies.leaderboard.statistics import mean_of

FOUR_ARMS = ("base", "sft", "grpo", "sft_grpo")
COLOURS = dict(zip(FOUR_ARMS, ("#9e9e9e", "#4c9be8", "#f0a030", "#2e8b57"), strict=True))
Accuracies = dict[str, dict[str, Any]]  # the parser's row of each setup


def demo_folder(task: str, runs: Path = ROOT / "runs" / "demo") -> Path:
    """Where `demo.py` puts the seeds of a task."""
    return runs if task == "sudoku" else runs / task


def setup_name(task: str, arm: str, length: int, split: str = "test") -> str:
    """What the generation files of an arm at a length are called."""
    recipe = RECIPES[task]
    model = recipe.base if arm == "base" else arm
    middle = "" if split == "test" else f"_{split}"
    return f"{recipe.task}_{model}{middle}_{length}_{length // 2}"


def pairs_of(arms: Sequence[str]) -> list[tuple[str, str]]:
    return [(a, b) for a, b in PAIRS if a in arms and b in arms]


def solved(folder: Path, task: str, name: str) -> np.ndarray:
    """(problems,) 1 where a setup's completion solves the problem, in the order of the split."""
    module = load_task(RECIPES[task].task)
    answered = json.loads((folder / "generations" / f"{name}_0_generations.json").read_text())["generations"]
    answered.sort(key=lambda one: one["index"])
    return np.array([module.score(one["text"], one)["accuracy"] for one in answered])


def differences(folders: Sequence[Path], task: str, arms: Sequence[str], split: str = "test") -> str:
    """Paired by problem, each seed's difference in points; their mean with its 95% interval over seeds and problems;
    the largest p of the seeds' exact sign tests; in how many seeds the two arms' own intervals do not touch."""
    rows = []
    tables = [accuracies(folder) for folder in folders]
    every = [setup_name(task, arm, length, split) for arm in arms for length in RECIPES[task].lengths]
    right = {name: np.stack([solved(folder, task, name) for folder in folders]) for name in every}
    for (a, b), length in product(pairs_of(arms), RECIPES[task].lengths):
        names = setup_name(task, a, length, split), setup_name(task, b, length, split)
        results = [parse(folder, "--compare", *names) for folder in folders]
        mean = mean_of(100 * (right[names[1]] - right[names[0]]))
        apart = sum(table[names[1]]["ci_low"] > table[names[0]]["ci_high"] for table in tables)
        gains = [f"{result['difference']:+.1f}" for result in results]
        ends = [f"{mean.value:+.1f} [{mean.low:+.1f}, {mean.high:+.1f}]", f"{max(r['p_value'] for r in results):.1g}"]
        rows.append([f"{b} - {a}", str(length), *gains, *ends, f"{apart}/{len(folders)}"])
    header = [f"{task}: paired difference, points", "length", *(folder.name for folder in folders)]
    return markdown_table([*header, "mean [95% interval]", "largest p", "intervals apart"], rows)


def examples(folder: Path, task: str, arms: Sequence[str], split: str = "test") -> str:
    """What each model answered to the first problems, at the longer length; right answers in bold."""
    module, length = load_task(RECIPES[task].task), RECIPES[task].lengths[-1]
    names = [setup_name(task, arm, length, split) for arm in arms]
    files = [folder / "generations" / f"{name}_0_generations.json" for name in names]
    answered = [json.loads(file.read_text())["generations"][:EXAMPLES] for file in files]
    rows = []
    for problem in zip(*answered, strict=True):
        texts = [one["generations"] for one in problem]
        right = [module.score(one["generations"], one)["accuracy"] for one in problem]
        answers = [str(module.extract(text) or "none").replace("*", r"\*") for text in texts]
        marked = [f"**{answer}**" if good else answer for answer, good in zip(answers, right, strict=True)]
        rows.append([problem[0]["question"].strip().replace("\n", " "), *marked])
    return markdown_table(["problem", *arms], rows)


def write_task_report(
    folder: Path, task: str, arms: Sequence[str], seconds: dict[str, float], console: Console, split: str = "test"
) -> Path:
    """Writes table.json, curves.png and report.md into `folder` and shows the table; returns the report's path."""
    table, lengths = accuracies(folder), RECIPES[task].lengths
    (folder / "table.json").write_text(json.dumps(table, indent=1) + "\n")
    rows = [[ARMS[arm], *(cell(table[setup_name(task, arm, n, split)]) for n in lengths)] for arm in arms]
    shown = markdown_table(["solved, %", *(f"length {n}" for n in lengths)], rows)
    console.print(shown, markup=False)
    trained = [arm for arm in arms if "grpo" in arm]
    runs, labels = [str(folder / arm) for arm in trained], [ARMS[arm] for arm in trained]
    curves = [sys.executable, "plot_curves.py", *runs, "--labels", *labels, "--output", str(folder / "curves.png")]
    subprocess.run(curves, cwd=ROOT / "diffu-grpo", check=True)
    n = table[setup_name(task, "base", lengths[0], split)]["n"]
    text = f"# d1 on the pocket model: {task}\n\nSolved, in percent of {n} {split} problems, greedy, with 95% "
    text += "intervals.\n\n"
    text += f"{shown}\n## Differences\n\n{differences([folder], task, arms, split)}"
    text += "\n## Training\n\n![Reward, accuracy, KL and length against rollouts](curves.png)\n\n"
    text += "What RL did, with completions that play: "
    text += ", ".join(f"[{ARMS[arm]}]({arm}/report.html)" for arm in trained) + ".\n\n"
    text += f"## Ten problems\n\n{examples(folder, task, arms, split)}\n## Seconds a phase\n\n"
    text += markdown_table(["phase", "seconds"], [[name, f"{value:.0f}"] for name, value in seconds.items()])
    path = folder / "report.md"
    path.write_text(text)
    return path


def finished(task: str, runs: Path) -> list[Path]:
    """The seeds of a task whose four arms have all been evaluated."""
    names = {setup_name(task, arm, length) for arm in FOUR_ARMS for length in RECIPES[task].lengths}
    folders = sorted(path.parent for path in demo_folder(task, runs).glob("seed*/table.json"))
    return [folder for folder in folders if names <= json.loads((folder / "table.json").read_text()).keys()]


def values_of(tables: Sequence[Accuracies], task: str, arm: str, length: int) -> list[float]:
    return [table[setup_name(task, arm, length)]["accuracy"] for table in tables]


def spread(values: Sequence[float]) -> tuple[float, float]:
    """Mean and standard deviation; 0 for one value."""
    return statistics.mean(values), statistics.stdev(values) if len(values) > 1 else 0.0


def tasks_table(tables: dict[str, list[Accuracies]]) -> str:
    """Tasks and lengths x four arms, mean and standard deviation over seeds."""
    rows = []
    for task, found in tables.items():
        for length in RECIPES[task].lengths:
            cells = ["{:.1f} ± {:.1f}".format(*spread(values_of(found, task, arm, length))) for arm in FOUR_ARMS]
            rows.append([f"{task}, length {length}", *cells, str(len(found))])
    return markdown_table(["solved, % of test problems", *(ARMS[arm] for arm in FOUR_ARMS), "seeds"], rows)


def draw(tables: dict[str, list[Accuracies]], path: Path) -> None:
    """Bars of each arm at two lengths, a panel a task, with the standard deviation over seeds."""
    figure, axes = panels(1, len(tables), size=(4 * len(tables), 3.6), share_y=True)
    for axis, (task, found) in zip(axes, tables.items(), strict=True):
        lengths = RECIPES[task].lengths
        for at, arm in enumerate(FOUR_ARMS):
            means, deviations = zip(*(spread(values_of(found, task, arm, n)) for n in lengths), strict=True)
            places = [group + 0.2 * (at - 1.5) for group in range(len(lengths))]
            axis.bar(places, means, 0.19, yerr=deviations, capsize=2, label=ARMS[arm], color=COLOURS[arm])
        axis.set(title=task, ylim=(0, 100))
        axis.set_xticks(range(len(lengths)), [f"length {n}" for n in lengths])
    axes[0].set_ylabel("solved, % of test problems")
    ncols = len(FOUR_ARMS) if len(tables) > 1 else 2
    figure.legend(*axes[0].get_legend_handles_labels(), loc="outside upper center", ncols=ncols, fontsize="small")
    save_figure(figure, path)


def make_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--runs", type=Path, default=ROOT / "runs" / "demo", help="what demo.py wrote")
    parser.add_argument("--figure", type=Path, default=ROOT / "pocket" / "figures" / "tasks.png")
    return parser


def main(args: argparse.Namespace) -> None:
    folders = {task: found for task in RECIPES if (found := finished(task, args.runs))}
    if not folders:
        raise FileNotFoundError(f"no finished job in {args.runs}: make demo, make demo TASK=countdown")
    tables = {task: [accuracies(folder) for folder in found] for task, found in folders.items()}
    draw(tables, args.figure)
    texts = [tasks_table(tables), *(differences(found, task, FOUR_ARMS) for task, found in folders.items())]
    sys.stdout.write("\n".join(texts))


if __name__ == "__main__":
    run_script("task_report.py", lambda: main(make_parser().parse_args()))
