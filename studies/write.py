"""Writes every table of the studies into its page, from the data in the repository: `make studies`.

A study whose data are incomplete says so in its page.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable
from pathlib import Path

from d1.runs.cli import OneLineParser, run_script
from studies.collapse.report import parts as collapse
from studies.distill.report import parts as distill
from studies.factorial import report as factorial
from studies.readme import parts as readme
from studies.reports import write_part
from studies.samplers import frontier_report
from studies.smollm2.report import parts as smollm2
from studies.tools.report import parts as tools

# Each gives the written part of its pages.
STUDIES: tuple[Callable[[], dict[Path, str]], ...] = (
    collapse,
    distill,
    factorial.parts,
    frontier_report.parts,
    readme,
    smollm2,
    tools,
)


def make_parser() -> argparse.ArgumentParser:
    return OneLineParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)


def main(args: argparse.Namespace) -> None:
    for parts in STUDIES:
        for page, text in parts().items():
            write_part(page, text)
    frontier_report.figure()
    factorial.write_figure()


if __name__ == "__main__":
    run_script("studies.write", lambda: main(make_parser().parse_args()))
