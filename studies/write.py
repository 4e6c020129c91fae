"""Writes every table of the studies into its page, from the data in the repository: `make studies`.

A study whose data are incomplete says so in its page.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable
from pathlib import Path

from d1.runs.cli import OneLineParser, run_script
from studies.causal_context.report import parts as causal_context
from studies.collapse import report as collapse
from studies.distill.report import parts as distill
from studies.editing.report import parts as editing
from studies.estimators import report as estimators
from studies.factorial import report as factorial
from studies.ladder import report as ladder
from studies.leaderboard import report as leaderboard
from studies.order.report import parts as order
from studies.preference.report import parts as preference
from studies.reports import write_part
from studies.samplers import frontier_report, rollouts_report
from studies.staleness.report import parts as staleness
from studies.tools.report import parts as tools
from studies.uniform_noise.report import parts as uniform_noise

# Each gives the written part of its pages.
STUDIES: tuple[Callable[[], dict[Path, str]], ...] = (
    causal_context,
    collapse.parts,
    distill,
    editing,
    estimators.parts,
    factorial.parts,
    ladder.parts,
    order,
    preference,
    frontier_report.parts,
    rollouts_report.parts,
    staleness,
    tools,
    uniform_noise,
)


def make_parser() -> argparse.ArgumentParser:
    return OneLineParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)


def main(args: argparse.Namespace) -> None:
    for parts in STUDIES:
        for page, text in parts().items():
            write_part(page, text)
    frontier_report.figure()
    collapse.write_figure()
    estimators.figure()
    factorial.write_figure()
    ladder.write_figure()
    leaderboard.write()


if __name__ == "__main__":
    run_script("studies.write", lambda: main(make_parser().parse_args()))
