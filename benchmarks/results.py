"""python -m benchmarks.results [--only TEXT]

Runs the commands of `RESULTS.md`, one after the other on one thread, and puts the tables they write into it: each
command stands above a comment that names its table, a file of `benchmark_results/`. `--only` runs those that contain
TEXT. Commands for a GPU run only where there is one, and all others run without it. All of it takes 16 minutes on
two idle cores. Each table is written as soon as it is made: a command that fails stops the run and loses none.
"""

from __future__ import annotations

import argparse
import os
import re
import shlex
import subprocess
import sys
import time
from pathlib import Path

import torch

from d1.runs.entry import run_script

RESULTS = Path(__file__).with_name("RESULTS.md")
COMMAND = re.compile(
    r"(?P<head>^```bash\n(?P<command>python [^`]+)\n```\n\n<!-- (?P<table>[\w-]+\.md) -->\n).*?(?=^<!-- end -->$)",
    re.MULTILINE | re.DOTALL,
)
ONE_THREAD = {"OMP_NUM_THREADS": "1", "OMP_WAIT_POLICY": "PASSIVE", "HF_HUB_OFFLINE": "1"}
NO_GPU = {"CUDA_VISIBLE_DEVICES": ""}  # the text around the other tables speaks of one thread of a processor


def for_gpu(command: str) -> bool:
    return "bench.py gpu" in command


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
