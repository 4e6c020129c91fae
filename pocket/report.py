"""Tables, figures and text of the main job, from the generation files and logs its phases left.

    python -m pocket.report runs/demo/seed0 runs/demo/seed1 runs/demo/seed2      # the tables over several seeds

A single job's report is written by `demo.py`.
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

from rich.console import Console
from rich.table import Table

from d1.runs.entry import run_script
from d1.show.tables import markdown_table
from d1.tasks.sudoku import extract

ROOT = Path(__file__).resolve().parents[1]
ARMS = {
    "base": "base",
    "sft": "+ SFT",
    "grpo": "+ diffu-GRPO",
    "sft_grpo": "+ SFT + diffu-GRPO (d1)",
    "shuffled": "control: diffu-GRPO, shuffled rewards",
}
LENGTHS = (32, 40)  # tokens generated; 16 and 20 diffusion steps
PAIRS = (("base", "sft"), ("base", "grpo"), ("sft", "sft_grpo"), ("grpo", "sft_grpo"), ("base", "shuffled"))
FINAL = "sft_grpo"  # what `watch` shows beside the base
EXAMPLES = 10


def base_of(folder: Path) -> str:
    """The folder in pocket/ of the base that a job's folder began with."""
    blocks = any((folder / "generations").glob("sudoku_block_base_*"))
    return "block_base" if blocks else "base"


def setup_name(folder: Path, arm: str, length: int) -> str:
    """What the generation files of an arm at a length are called in a job's folder; the base goes by its own name."""
    return f"sudoku_{base_of(folder) if arm == 'base' else arm}_{length}_{length // 2}"


def parse(folder: Path, *flags: str) -> Any:
    """JSON output of `parse_and_get_acc.py` on a job's generations."""
    generations = folder.resolve() / "generations"
    command = [sys.executable, "parse_and_get_acc.py", str(generations), "--format", "json", *flags]
    done = subprocess.run(command, cwd=ROOT / "eval", capture_output=True, text=True, check=False)
    if done.returncode:
        raise RuntimeError(f"{' '.join(command)} failed:\n{done.stderr[-2000:]}")
    return json.loads(done.stdout)


def accuracies(folder: Path) -> dict[str, dict[str, Any]]:
    """The parser's row of every setup, by its name."""
    return {row["setup"]: row for row in parse(folder)}


def cell(row: dict[str, Any]) -> str:
    return f"{row['accuracy']:.1f} [{row['ci_low']:.1f}, {row['ci_high']:.1f}]"


def write_report(folder: Path, seconds: dict[str, float], console: Console) -> Path:
    """Writes table.json, curves.png and report.md into `folder` and shows the table; returns the report's path."""
    table = accuracies(folder)
    (folder / "table.json").write_text(json.dumps(table, indent=1) + "\n")
    rows = [
        [title, *(cell(table[setup_name(folder, arm, length)]) for length in LENGTHS)] for arm, title in ARMS.items()
    ]
    shown = Table("exact solves, % [95% interval]", *(f"length {length}" for length in LENGTHS))
    for row in rows:
        shown.add_row(*row)
    console.print(shown)

    arms = ["grpo", "sft_grpo", "shuffled"]
    runs = [str(folder / arm) for arm in arms]
    labels = [ARMS[arm] for arm in arms]
    curves = [sys.executable, "plot_curves.py", *runs, "--labels", *labels, "--output", str(folder / "curves.png")]
    subprocess.run(curves, cwd=ROOT / "diffu-grpo", check=True)

    n = next(iter(table.values()))["n"]
    text = f"# d1 on the pocket model\n\nExact solves in percent on {n} test puzzles, greedy, with 95% intervals.\n\n"
    text += markdown_table(["", *(f"length {length}" for length in LENGTHS)], rows)
    text += "\n## Differences, paired by puzzle\n\n" + differences_table(folder)
    text += "\n## Training\n\n![Reward, accuracy, KL and length against rollouts](curves.png)\n\n"
    text += "Dashed: validation puzzles, one sampled completion each. What RL did, with completions that play: "
    text += ", ".join(f"[{ARMS[arm]}]({arm}/report.html)" for arm in arms) + ".\n\n"
    watch(folder)
    text += f"## One puzzle, {ARMS['base']} and {ARMS[FINAL]}\n\n![The puzzle denoised by both](watch.svg)\n\n"
    text += "[The same as a page](watch.html) plays, stops, and says how sure each token was.\n\n"
    text += "## Ten problems\n\n" + examples(folder)
    text += "\n## Seconds a phase\n\n"
    text += markdown_table(["phase", "seconds"], [[name, f"{value:.0f}"] for name, value in seconds.items()])
    path = folder / "report.md"
    path.write_text(text)
    return path


def watch(folder: Path) -> None:
    """Writes watch.html and watch.svg into `folder`: the first validation puzzle, before and after everything."""
    command = [sys.executable, "-m", "d1", "watch", "--dataset", "sudoku", "--split", "validation"]
    command += ["--gen_length", str(LENGTHS[0]), "--block_length", "8", "--model_path", f"pocket/{base_of(folder)}"]
    command += ["--against", f"model_path={folder.resolve() / FINAL}"]
    for kind in ("html", "svg"):
        command += [f"--{kind}", str(folder.resolve() / f"watch.{kind}")]
    subprocess.run(command, cwd=ROOT, stdout=subprocess.DEVNULL, check=True)


def differences_table(folder: Path) -> str:
    rows = []
    for (a, b), length in product(PAIRS, LENGTHS):
        result = parse(folder, "--compare", *(setup_name(folder, arm, length) for arm in (a, b)))
        better = f"{result['b_better']} / {result['a_better']}"
        rows.append([f"{b} - {a}, length {length}", f"{result['difference']:+.1f}", better, f"{result['p_value']:.2g}"])
    return markdown_table(["", "points", "puzzles better / worse", "exact sign test p"], rows)


def examples(folder: Path) -> str:
    """What each model answered to the first problems, at the longer length; right answers in bold."""
    files = {arm: folder / "generations" / f"{setup_name(folder, arm, LENGTHS[-1])}_0_generations.json" for arm in ARMS}
    problems = {arm: json.loads(file.read_text())["generations"][:EXAMPLES] for arm, file in files.items()}
    rows = []
    for index, problem in enumerate(problems["base"]):
        solution = problem["ground_truth"]
        answers = [extract(problems[arm][index]["generations"]) or "" for arm in ARMS]
        marked = [f"**{answer}**" if answer == solution else answer or "none" for answer in answers]
        rows.append([problem["question"].strip()[-16:], solution, *marked])
    return markdown_table(["puzzle", "solution", *ARMS], rows)


def summary(folders: Sequence[Path]) -> str:
    """Four tables over seeds: the mean of each arm with its standard deviation, each seed's exact solves, the
    differences of `PAIRS`, paired by puzzle, and what a completion costs."""
    tables = [accuracies(folder) for folder in folders]
    parts = [
        means_table(folders, tables),
        seeds_table(folders, tables),
        paired_table(folders, tables),
        cost_table(folders),
    ]
    return "\n".join(parts)


def mean_and_deviation(values: Sequence[float]) -> tuple[str, str]:
    deviation = statistics.stdev(values) if len(values) > 1 else 0.0
    return f"{statistics.mean(values):.1f}", f"{deviation:.1f}"


def rows_of(folders: Sequence[Path], tables: Sequence[dict[str, Any]], arm: str, length: int) -> list[dict[str, Any]]:
    """An arm's row at a length in each seed's table."""
    return [table[setup_name(folder, arm, length)] for folder, table in zip(folders, tables, strict=True)]


def means_table(folders: Sequence[Path], tables: Sequence[dict[str, dict[str, Any]]]) -> str:
    rows = []
    for arm, title in ARMS.items():
        found = ([row["accuracy"] for row in rows_of(folders, tables, arm, length)] for length in LENGTHS)
        rows.append([title, *(" ± ".join(mean_and_deviation(values)) for values in found)])
    return markdown_table(["exact solves, %", *(f"length {length}" for length in LENGTHS)], rows)


def seeds_table(folders: Sequence[Path], tables: Sequence[dict[str, dict[str, Any]]]) -> str:
    rows = []
    for (arm, title), length in product(ARMS.items(), LENGTHS):
        found = rows_of(folders, tables, arm, length)
        ends = mean_and_deviation([row["accuracy"] for row in found])
        rows.append([title, str(length), *map(cell, found), *ends])
    return markdown_table(["exact solves, %", "length", *(folder.name for folder in folders), "mean", "sd"], rows)


def paired_table(folders: Sequence[Path], tables: Sequence[dict[str, dict[str, Any]]]) -> str:
    """With the largest p of the seeds, and in how many of them the two intervals do not touch."""
    rows = []
    for (a, b), length in product(PAIRS, LENGTHS):
        results = [
            parse(folder, "--compare", *(setup_name(folder, arm, length) for arm in (a, b))) for folder in folders
        ]
        gains = [result["difference"] for result in results]
        largest = max(result["p_value"] for result in results)
        pairs = zip(*(rows_of(folders, tables, arm, length) for arm in (a, b)), strict=True)
        apart = sum(second["ci_low"] > first["ci_high"] for first, second in pairs)
        ends = [f"{statistics.mean(gains):+.1f}", f"{largest:.1g}", f"{apart}/{len(folders)}"]
        rows.append([f"{b} - {a}", str(length), *(f"{gain:+.1f}" for gain in gains), *ends])
    header = ["paired difference, points", "length", *(folder.name for folder in folders)]
    return markdown_table([*header, "mean", "largest p", "intervals apart"], rows)


def cost_table(folders: Sequence[Path]) -> str:
    """Tokens that a completion feeds through the model's body, the mean over all."""

    def fed(length: int) -> float:
        names = [(folder, setup_name(folder, arm, length)) for folder, arm in product(folders, ARMS)]
        files = [folder / "generations" / f"{name}_0_generations.json" for folder, name in names]
        items = [item for file in files for item in json.loads(file.read_text())["generations"]]
        return statistics.mean(item["forward_tokens"] for item in items)

    header = ["tokens through the body a completion", *(f"length {length}" for length in LENGTHS)]
    return markdown_table(header, [["", *(f"{fed(length):.0f}" for length in LENGTHS)]])


def make_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folders", nargs="+", help="result folders of demo.py, one a seed")
    return parser


def main(args: argparse.Namespace) -> None:
    sys.stdout.write(summary([Path(folder) for folder in args.folders]))


if __name__ == "__main__":
    run_script("report.py", lambda: main(make_parser().parse_args()))
