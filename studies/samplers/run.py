"""Test whether fast samplers are stable in online RL, why they fail where they do, and what they save.

    python -m studies.samplers.run                        # an hour on one core; docs/fast_rollouts.md and its figure
    python -m studies.samplers.run --cures "weights up to 3" --samplers cached cached+parallel
    python -m studies.samplers.run --split validation --samplers exact --estimators one_step --learning_rate 3e-4
    python -m studies.samplers.run --only_report          # the tables of existing results

Each run starts from SFT and trains for the same number of processor seconds, in this process, on one core. Every saved
model is judged by the exact sampler. Results are lines of `results.jsonl` in the output folder. If the study is killed,
run the same command to continue with the interrupted run. Tables contain only test problems; choices are made on the
validation split.
"""

from __future__ import annotations

import argparse
from pathlib import Path

from rich.console import Console

from d1.ranges import COUNT
from d1.runs.entry import OneLineParser, run_script
from studies.leaderboard.plan import ROOT, START, TASKS
from studies.samplers.report import write_report
from studies.samplers.runs import CURES, ESTIMATORS, NO_CURE, RATE, SAMPLERS, SEEDS, Run, check_numbers, run_missing

DOCUMENT = ROOT / "docs" / "fast_rollouts.md"


def make_parser() -> argparse.ArgumentParser:
    parser = OneLineParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--task", choices=[*TASKS], default="sudoku")
    parser.add_argument("--samplers", nargs="+", default=[*SAMPLERS], choices=[*SAMPLERS], metavar="SAMPLER")
    parser.add_argument("--estimators", nargs="+", default=[*ESTIMATORS], choices=[*ESTIMATORS])
    parser.add_argument("--cures", nargs="+", default=[NO_CURE], choices=[*CURES], metavar="CURE")
    parser.add_argument("--seeds", type=int, nargs="+", default=[*SEEDS])
    parser.add_argument("--split", choices=["test", "validation"], default="test", help="problems to judge on")
    parser.add_argument("--learning_rate", type=float, default=RATE, help="constant learning rate")
    parser.add_argument("--seconds", type=float, default=60.0, help="processor seconds of training per run")
    parser.add_argument("--points", type=int, default=4, help="models judged per run, at even shares of the seconds")
    parser.add_argument("--limit", type=int, default=0, help="judge on this number of problems; default: all")
    parser.add_argument("--output_dir", type=Path, default=ROOT / "runs" / "fast_rollouts")
    parser.add_argument("--document", type=Path, help="default: docs/fast_rollouts.md; with --limit in --output_dir")
    parser.add_argument("--only_report", action="store_true", help="run nothing, report existing results")
    return parser


def planned(args: argparse.Namespace) -> list[Run]:
    """The runs, seed by seed, so that an incomplete study has all setups."""
    common = (args.split, args.learning_rate, args.seconds, args.points, args.limit)
    runs = []
    for seed in args.seeds:
        runs.append(Run(args.task, START, START, NO_CURE, seed, args.split, 0.0, 0.0, 1, args.limit))
        for cure in args.cures:
            for estimator in args.estimators:
                runs += [Run(args.task, sampler, estimator, cure, seed, *common) for sampler in args.samplers]
    return runs


def check(args: argparse.Namespace) -> None:
    """Raises ValueError for a number out of its range."""
    check_numbers(args)
    if args.points not in COUNT or not args.seconds > 0:
        raise ValueError("--points and --seconds must be above 0")


def main(args: argparse.Namespace) -> None:
    check(args)
    console = Console()
    folder = args.output_dir.resolve()
    lines = run_missing([] if args.only_report else planned(args), folder, console)
    path = args.document or (folder / "fast_rollouts.md" if args.limit else DOCUMENT)
    shown = [line for line in lines if line["run"]["limit"] == args.limit]
    console.print(write_report(shown, path.resolve()), markup=False)


if __name__ == "__main__":
    run_script("studies.samplers.run", lambda: main(make_parser().parse_args()))
