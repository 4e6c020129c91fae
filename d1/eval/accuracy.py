"""python parse_and_get_acc.py [FOLDER] [--scoring strict|published] [--format table|json|csv|markdown] [--details FILE]

Scores generation files, d1's or ours, and prints one row a setup. Without a folder it scores `eval_baselines/`, the
pocket models' own generations. Exit code 1 when a setup is incomplete, unless `--allow-partial`.

    python -m d1 parse results/ --compare sudoku_base_32_16 sudoku_sft_32_16
    python -m d1 parse results/ --plot accuracy.png
"""

from __future__ import annotations

import argparse
import csv
import io
import json
import sys
from collections.abc import Sequence
from dataclasses import asdict
from itertools import groupby
from pathlib import Path
from typing import Any, NoReturn

from d1.eval.files import GeneratedSetup, read_setups
from d1.eval.scores import Row, compare, score_setup, user_tasks
from d1.runs.entry import OneLineParser, run_script
from d1.show.tables import markdown_table

BASELINES = Path(__file__).resolve().parents[2] / "eval" / "eval_baselines"  # of a checkout


def make_parser(prog: str | None = None) -> argparse.ArgumentParser:
    parser = OneLineParser(prog, description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", nargs="?", default=str(BASELINES), help="folder of *_generations.json files")
    parser.add_argument(
        "--scoring",
        choices=["strict", "published"],
        default="strict",
        help="strict: the tasks' own metrics; published: d1's released rules, faults included",
    )
    parser.add_argument("--format", choices=["table", "json", "csv", "markdown"], default="table")
    parser.add_argument("--details", metavar="FILE", help="write what was made of each problem here, as JSON lines")
    parser.add_argument(
        "--compare",
        nargs=2,
        metavar=("A", "B"),
        help="paired difference of two setups: their names in FOLDER, or OTHER_FOLDER/NAME",
    )
    parser.add_argument("--plot", metavar="PNG", help="plot accuracy by length next to d1's published figures")
    parser.add_argument("--allow-partial", action="store_true", help="exit with 0 even if problems are missing")
    parser.add_argument("--task_file", action="append", default=[], help="a user's task, as given to eval.py --dataset")
    return parser


def main(args: argparse.Namespace) -> int:
    """Runs the command; returns the exit code: 1 where a setup is incomplete or holds errors."""
    if args.folder == str(BASELINES) and not BASELINES.is_dir():
        raise FileNotFoundError("name a folder of generation files: only a checkout has those of the pocket models")
    own_tasks = user_tasks(*args.task_file)
    setups = [find_setup(name, args.folder) for name in args.compare or ()] or read_setups(args.folder)
    scored = [score_setup(setup, args.scoring, own_tasks) for setup in setups]
    rows = [row for row, _ in scored]
    if args.details:
        lines = (json.dumps(detail, default=str) + "\n" for _, details in scored for detail in details)
        Path(args.details).write_text("".join(lines), encoding="utf-8")
    if args.plot:
        plot_rows(rows, args.plot)
    if args.compare:
        (row_a, details_a), (row_b, details_b) = scored
        sys.stdout.write(format_comparison(compare(row_a.setup, details_a, row_b.setup, details_b), args.format))
    else:
        sys.stdout.write(FORMATS[args.format](rows))
    sys.stderr.write("".join(line + "\n" for row in rows for line in row_reports(row)))
    return 0 if args.allow_partial or all(row.complete for row in rows) else 1


def find_setup(name: str, folder: str) -> GeneratedSetup:
    """A setup by its name in `folder`, or by `other_folder/name`."""
    where, _, own = name.rpartition("/")
    setups = {setup.name: setup for setup in read_setups(where or folder)}
    if own not in setups:
        raise ValueError(f"no setup {own!r} in {where or folder}: there are {', '.join(setups)}")
    return setups[own]


# ---- output


def row_reports(row: Row) -> list[str]:
    """What a reader of the row must know: losses first, then oddities."""
    lines = [f"ERROR {error}" for error in row.errors] + [f"note  {note}" for note in row.notes]
    if row.missing_ranks:
        lines.append(f"ERROR {row.setup}: no file of rank {as_ranges(row.missing_ranks)}")
    if row.expected is not None and row.n < row.expected:
        lines.append(f"ERROR {row.setup}: {row.n} of {row.expected} problems scored")
    if row.duplicates:
        again = "counted again, as d1 does" if row.scoring == "published" else "counted once"
        lines.append(f"note  {row.setup}: {row.duplicates} problems occur more than once, {again}")
    return lines


def as_ranges(numbers: list[int]) -> str:
    """Ascending whole numbers as people write them: [0, 2, 3, 4] is "0, 2-4"."""
    runs = [[number for _, number in run] for _, run in groupby(enumerate(numbers), lambda pair: pair[1] - pair[0])]
    return ", ".join(str(run[0]) if len(run) == 1 else f"{run[0]}-{run[-1]}" for run in runs)


def cells_of(row: Row) -> dict[str, str]:
    """A row as the texts of the table's columns."""

    def number(value: float | None, digits: int) -> str:
        return "-" if value is None else f"{value:.{digits}f}"

    also = [f"{name} {value:.2f}" for name, value in row.metrics.items()]
    if row.pass_at_k is not None:
        also += [f"pass@{row.num_samples} {row.pass_at_k:.2f}", f"majority {row.majority:.2f}"]
    return {
        "setup": row.setup,
        "accuracy %": number(row.accuracy, 2),
        "95% interval": f"[{number(row.ci_low, 2)}, {number(row.ci_high, 2)}]",
        "coverage": f"{row.n}/{'?' if row.expected is None else row.expected}{'' if row.complete else ' (!)'}",
        "tokens": number(row.tokens, 1),
        "forward passes": number(row.forward_passes, 1),
        "also %": ", ".join(also),
    }


def as_table(rows: list[Row]) -> str:
    columns = []
    for name, *texts in zip(*([*cells_of(rows[0])], *(cells_of(row).values() for row in rows)), strict=True):
        width = max(map(len, (name, *texts)))
        columns.append([f"{text:{'<' if name in ('setup', 'also %') else '>'}{width}}" for text in (name, *texts)])
    return "".join("  ".join(line).rstrip() + "\n" for line in zip(*columns, strict=True))


def as_markdown(rows: list[Row]) -> str:
    return markdown_table([*cells_of(rows[0])], [[*cells_of(row).values()] for row in rows])


def as_csv(rows: list[Row]) -> str:
    flat: list[dict[str, Any]] = []
    for row in rows:
        counts = {"missing_ranks": " ".join(map(str, row.missing_ranks)), "errors": len(row.errors)}
        values = asdict(row) | counts | {"notes": len(row.notes)}
        flat.append(values | {f"metric_{name}": value for name, value in values.pop("metrics").items()})
    stream = io.StringIO()
    writer = csv.DictWriter(stream, fieldnames=list(dict.fromkeys(name for row in flat for name in row)))
    writer.writeheader()
    writer.writerows(flat)
    return stream.getvalue()


def as_json(rows: list[Row]) -> str:
    return json.dumps([asdict(row) for row in rows], indent=1) + "\n"


FORMATS = {"table": as_table, "json": as_json, "csv": as_csv, "markdown": as_markdown}


def format_comparison(result: dict[str, Any], form: str) -> str:
    if form == "json":
        return json.dumps(result, indent=1) + "\n"
    if form == "csv":
        return ",".join(result) + "\n" + ",".join(map(str, result.values())) + "\n"
    text = (
        "{b}: {accuracy_b:.2f}%  minus  {a}: {accuracy_a:.2f}%  =  {difference:+.2f} points over "
        "{shared} shared problems\n"
        "better on {b_better}, worse on {a_better}, equal on {equal}; exact sign test p = {p_value:.4g}\n"
    )
    if result["only_a"] or result["only_b"]:
        text += "not compared: {only_a} only in {a}, {only_b} only in {b}\n"
    return text.format(**result, equal=result["shared"] - result["b_better"] - result["a_better"])


# ---- plot

# LLaDA-8B at lengths 128, 256 and 512: d1 (arXiv 2504.12216), table 1.
PUBLISHED_LENGTHS = (128, 256, 512)
PUBLISHED = {
    "gsm8k": {
        "LLaDA-8B-Instruct": (68.7, 76.7, 78.2),
        "+ SFT": (66.5, 78.8, 81.1),
        "+ diffu-GRPO": (72.6, 79.8, 81.9),
        "d1 (SFT + diffu-GRPO)": (73.2, 81.1, 82.1),
    },
    "math": {
        "LLaDA-8B-Instruct": (26.0, 32.4, 36.2),
        "+ SFT": (26.2, 32.6, 34.8),
        "+ diffu-GRPO": (33.2, 37.2, 39.2),
        "d1 (SFT + diffu-GRPO)": (33.8, 38.6, 40.2),
    },
    "countdown": {
        "LLaDA-8B-Instruct": (20.7, 19.5, 16.0),
        "+ SFT": (20.3, 14.5, 23.8),
        "+ diffu-GRPO": (33.2, 31.3, 37.1),
        "d1 (SFT + diffu-GRPO)": (34.8, 32.0, 42.2),
    },
    "sudoku": {
        "LLaDA-8B-Instruct": (11.7, 6.7, 5.5),
        "+ SFT": (16.5, 8.5, 4.6),
        "+ diffu-GRPO": (18.4, 12.9, 11.0),
        "d1 (SFT + diffu-GRPO)": (22.1, 16.7, 9.5),
    },
}
PUBLISHED_NOTE = "dashed: LLaDA-8B as published by d1 (Sudoku: share of cells, not of solved puzzles)"


def plot_rows(rows: Sequence[Row], path: str | Path) -> None:
    """One panel a task: the rows' accuracy with its 95% interval, solid, and d1's published figures, dashed.

    Raises:
        ValueError: no row has an accuracy.
    """
    from d1.show.curves import panels, save_figure  # matplotlib is slow to import

    scored = [row for row in rows if row.accuracy is not None]
    if not scored:
        raise ValueError("nothing to plot: no setup has a scored problem")
    tasks = sorted({row.task for row in scored})
    figure, axes = panels(1, len(tasks), size=(5.2 * len(tasks), 4.6))
    for axis, task in zip(axes, tasks, strict=True):
        for model in sorted({row.model for row in scored if row.task == task}):
            line = sorted((row for row in scored if (row.task, row.model) == (task, model)), key=lambda r: r.gen_length)
            heights = [row.accuracy or 0.0 for row in line]
            below = [height - (row.ci_low or 0.0) for height, row in zip(heights, line, strict=True)]
            above = [(row.ci_high or 0.0) - height for height, row in zip(heights, line, strict=True)]
            axis.errorbar([row.gen_length for row in line], heights, [below, above], marker="o", capsize=3, label=model)
        for name, published in PUBLISHED.get(task, {}).items():
            axis.plot(PUBLISHED_LENGTHS, published, linestyle="--", marker=".", alpha=0.6, label=f"{name}, published")
        lengths = sorted({row.gen_length for row in scored if row.task == task} | set(PUBLISHED_LENGTHS))
        axis.set_xscale("log", base=2)
        axis.set_xticks(lengths, [str(length) for length in lengths])
        axis.minorticks_off()
        axis.set(title=task, xlabel="completion length (tokens)", ylabel=f"accuracy, {scored[0].scoring} scoring (%)")
        axis.set_ylim(bottom=0)
        axis.legend(fontsize=7)
    figure.suptitle(PUBLISHED_NOTE, fontsize=8)
    save_figure(figure, path, dpi=150)


def cli(prog: str, arguments: Sequence[str] | None = None) -> NoReturn:
    """Scores generation files as the command `prog`, with `arguments` in place of those of the command line; exits."""
    run_script(prog, lambda: main(make_parser(prog).parse_args(arguments)))
