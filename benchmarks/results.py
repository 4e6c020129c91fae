"""python benchmarks/results.py [--only TEXT]

Runs the commands of `RESULTS.md`, one after the other on one thread, and puts the tables they write into it: each
command stands above a comment that names its table, a file of `benchmark_results/`. `--only` runs those that contain
TEXT; commands for a GPU are left out where there is none. Alone on two cores all of it takes ten minutes.
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

RESULTS = Path(__file__).with_name("RESULTS.md")
COMMAND = re.compile(
    r"(?P<head>^```bash\n(?P<command>python [^`]+)\n```\n\n<!-- (?P<table>[\w-]+\.md) -->\n).*?(?=^<!-- end -->$)",
    re.MULTILINE | re.DOTALL,
)
ONE_THREAD = {"OMP_NUM_THREADS": "1", "OMP_WAIT_POLICY": "PASSIVE", "HF_HUB_OFFLINE": "1"}


def run(command: str) -> None:
    """Runs a `python ...` command from the repository's root, with this interpreter."""
    words = shlex.split(command.replace("\\\n", " "))
    subprocess.run([sys.executable, *words[1:]], check=True, cwd=RESULTS.parents[1], env=os.environ | ONE_THREAD)


def fill(text: str, only: str = "") -> str:
    """`text` with the tables of its commands that contain `only` made anew."""

    def made(found: re.Match[str]) -> str:
        command = found["command"]
        if only not in command or ("bench.py gpu" in command and not torch.cuda.is_available()):
            return found[0]
        started = time.perf_counter()
        run(command)
        table = (RESULTS.parents[1] / "benchmark_results" / found["table"]).read_text()
        sys.stdout.write(f"--- {time.perf_counter() - started:.0f} s: {command}\n\n")
        return f"{found['head']}\n{table}\n"

    return COMMAND.sub(made, text)


def make_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", default="", metavar="TEXT", help="run the commands that contain this text")
    return parser


def main(args: argparse.Namespace) -> None:
    RESULTS.write_text(fill(RESULTS.read_text(), args.only))


if __name__ == "__main__":
    main(make_parser().parse_args())
