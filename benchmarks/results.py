"""How a benchmark's results are written, as JSON and Markdown, and the command that fills `RESULTS.md` with them.

    python -m benchmarks.results --only scoring

runs the commands of `RESULTS.md` one after the other on one thread and replaces the table below each. A comment below
the command names the table, a file of `benchmark_results/`. `--only` chooses the commands that contain a text. Commands
for a GPU run only where there is one, and all others run without it. All of it takes 13 minutes on two idle cores.
Each table is written as soon as it is made, so a command that fails stops the run and loses none.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import shlex
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import torch

from d1.runs.entry import run_script
from d1.show.tables import markdown_table

RESULTS = Path(__file__).with_name("RESULTS.md")
COMMAND = re.compile(
    r"(?P<head>^```bash\n(?P<command>python [^`]+)\n```\n\n<!-- (?P<table>[\w-]+\.md) -->\n).*?(?=^<!-- end -->$)",
    re.MULTILINE | re.DOTALL,
)
ONE_THREAD = {"OMP_NUM_THREADS": "1", "OMP_WAIT_POLICY": "PASSIVE", "HF_HUB_OFFLINE": "1"}
NO_GPU = {"CUDA_VISIBLE_DEVICES": ""}  # the other tables are those of one thread of a processor


def results_table(rows: dict[str, dict[str, float]]) -> str:
    """A table with one row a name; a ratio stands with the lowest and the highest of its rounds."""
    columns = [name for name in next(iter(rows.values())) if name not in ("ratio_low", "ratio_high")]

    def cell(row: dict[str, float], column: str) -> str:
        if column != "ratio":
            return f"{row[column]:.4g}" if column in row else ""
        low, high = row["ratio_low"], row["ratio_high"]
        return f"{row['ratio']:.3f}" + (f" ({low:.3g} to {high:.3g})" if low < high else "")

    body = [[name, *(cell(row, column) for column in columns)] for name, row in rows.items()]
    return markdown_table(["", *(name.replace("_", " ") for name in columns)], body)


def as_markdown(report: dict[str, Any]) -> str:
    """A report's machine and settings in a line each, its tables, and its remarks."""
    parts = [", ".join(f"{key} {value}" for key, value in report[of].items()) + "  " for of in ("machine", "settings")]
    for key, value in report.items():
        if key == "remarks":
            parts += ["", *value]
        elif key not in ("machine", "settings"):
            parts += ["", *([] if key == "results" else [f"{key}:", ""]), results_table(value).rstrip()]
    return "\n".join(parts) + "\n"


def write_report(report: dict[str, Any], folder: str, name: str) -> None:
    """Writes `name.json` and `.md` into the folder, which is there, and prints the latter."""
    path = Path(folder)
    (path / f"{name}.json").write_text(json.dumps(report, indent=1))
    (path / f"{name}.md").write_text(as_markdown(report))
    sys.stdout.write(as_markdown(report))


def for_gpu(command: str) -> bool:
    return "benchmarks.bench gpu" in command


def run(command: str) -> None:
    """Runs a `python ...` command from the repository's root, with this interpreter."""
    words = shlex.split(command.replace("\\\n", " "))
    env = os.environ | ONE_THREAD | ({} if for_gpu(command) else NO_GPU)
    subprocess.run([sys.executable, *words[1:]], check=True, cwd=RESULTS.parents[1], env=env)


def fill(text: str, command: str, table: str) -> str:
    """`text` with `table` below `command`."""

    def filled(found: re.Match[str]) -> str:
        return f"{found['head']}\n{table}\n" if found["command"] == command else found[0]

    return COMMAND.sub(filled, text)


def make_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", default="", metavar="TEXT", help="run the commands that contain this text")
    return parser


def main(args: argparse.Namespace) -> None:
    chosen = [found for found in COMMAND.finditer(RESULTS.read_text()) if args.only in found["command"]]
    chosen = [found for found in chosen if torch.cuda.is_available() or not for_gpu(found["command"])]
    if not chosen:
        raise ValueError(f"{RESULTS.name} has no command with {args.only!r} that can run here")
    for found in chosen:
        started = time.perf_counter()
        run(found["command"])
        table = (RESULTS.parents[1] / "benchmark_results" / found["table"]).read_text()
        sys.stdout.write(f"--- {time.perf_counter() - started:.0f} s: {found['command']}\n\n")
        RESULTS.write_text(fill(RESULTS.read_text(), found["command"], table))  # read anew: it may have been edited


if __name__ == "__main__":
    run_script("results.py", lambda: main(make_parser().parse_args()))
