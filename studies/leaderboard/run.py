"""Which RL method is best at the same compute? Every method of `d1/rl/methods.py` on every pocket task.

    make leaderboard                                   # about five hours on two cores; docs/leaderboard.md
    python -m studies.leaderboard.run --quick          # seven minutes: one task, one seed, nothing searched
    python -m studies.leaderboard.run --only_report    # the tables of what is there

Four stages: SFT; the search of each method's rate and mu on validation problems; the board on test problems; d1 with
one of its choices changed at a time. Results are lines of `results.jsonl` in the output folder. Killed, even with -9?
The same command continues.
"""

from __future__ import annotations

import argparse
import os
from pathlib import Path

from rich.console import Console

from d1.ranges import COUNT
from d1.rl.methods import METHODS
from d1.runs.entry import OneLineParser, RunError, run_script
from pocket.demo import sft
from pocket.phases import Phase, PhaseError, run_phases
from studies.leaderboard.plan import (
    BUDGET,
    QUICK_BUDGET,
    ROOT,
    SEEDS,
    TASKS,
    Run,
    board_runs,
    change_runs,
    sft_folder,
    sft_name,
    start_runs,
    tuning_runs,
    untuned,
)
from studies.leaderboard.report import Board, write_report
from studies.leaderboard.results import check_problems, read_results, results_of, tuned

DOCUMENT = ROOT / "docs" / "leaderboard.md"


def make_parser() -> argparse.ArgumentParser:
    parser = OneLineParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="one seed from SFT on Sudoku, one rate for all")
    parser.add_argument("--only_report", action="store_true", help="run nothing, write what is there")
    parser.add_argument("--methods", nargs="+", default=[*METHODS], choices=[*METHODS], metavar="METHOD")
    parser.add_argument("--starts", nargs="+", default=["sft", "base"], choices=["sft", "base"])
    parser.add_argument("--seeds", type=int, nargs="+", help=f"default: {' '.join(map(str, SEEDS))}; quick: 0")
    parser.add_argument("--budget", type=int, help=f"compute_tokens of a run; default: {BUDGET}; quick: {QUICK_BUDGET}")
    parser.add_argument("--limit", type=int, default=0, help="judge on so many problems; default: all")
    parser.add_argument("--output_dir", type=Path, help="default: runs/leaderboard, or runs/leaderboard_quick")
    parser.add_argument("--document", type=Path, help="default: docs/leaderboard.md; quick: in the output folder")
    parser.add_argument("--jobs", type=int, default=min(2, os.cpu_count() or 1), help="runs side by side")
    return parser


def with_defaults(args: argparse.Namespace) -> argparse.Namespace:
    """Fills in what --quick decides.

    Raises:
        ValueError: a number out of its range.
    """
    args.seeds = args.seeds or ([0] if args.quick else [*SEEDS])
    args.budget = args.budget or (QUICK_BUDGET if args.quick else BUDGET)
    args.output_dir = (args.output_dir or ROOT / "runs" / f"leaderboard{'_quick' * args.quick}").resolve()
    args.document = (args.document or (args.output_dir / "leaderboard.md" if args.quick else DOCUMENT)).resolve()
    args.tasks = [next(iter(TASKS))] if args.quick else [*TASKS]
    args.starts = ["sft"] if args.quick and len(args.starts) > 1 else args.starts
    for name in ("budget", "jobs"):
        if getattr(args, name) not in COUNT:
            raise ValueError(f"--{name} must be at least 1, got {getattr(args, name)}")
    if args.limit < 0 or min(args.seeds) < 0:
        raise ValueError("--limit and --seeds must not be negative")
    return args


def searched(args: argparse.Namespace) -> list[Run]:
    return [] if args.quick else tuning_runs(args.methods, args.budget, args.limit)


def board(args: argparse.Namespace) -> Board:
    """What is to be run and what is there of it. Without its search a method is not on the board yet."""
    lines, search = read_results(args.output_dir), searched(args)
    settings = untuned(args.methods) if args.quick else tuned(results_of(lines, search), search)
    runs = board_runs(args.methods, settings, args.budget, args.seeds, args.starts, args.tasks, args.limit)
    starts = start_runs(runs)
    with_changes = not args.quick and not args.limit and "sft" in args.starts
    changed = change_runs(settings, args.budget, args.seeds) if with_changes else []
    results = results_of(lines, [*runs, *starts])
    check_problems(results)
    planned = len(args.methods) * len(args.seeds) * sum(len({*TASKS[t].starts} & {*args.starts}) for t in args.tasks)
    return Board(
        runs=runs,
        starts=starts,
        results=results,
        search=results_of(lines, search),
        changes=results_of(lines, changed),
        settings=settings,
        planned=planned,
        budget=args.budget,
        searched=len(search),
        changed=changed,
    )


def sft_phases(runs: list[Run], folder: Path) -> list[Phase]:
    """The SFT that runs begin from, one a task and seed."""
    needed = dict.fromkeys((run.task, run.seed) for run in runs if run.start == "sft")
    phases = []
    for task, seed in needed:
        phase = sft(sft_folder(folder, task, seed), seed, miniature=False, task=task)
        phases.append(Phase(sft_name(task, seed), phase.command, phase.folder, phase.weight))
    return phases


def run_all(runs: list[Run], args: argparse.Namespace, console: Console) -> None:
    phases = [*sft_phases(runs, args.output_dir), *(run.phase(args.output_dir) for run in runs)]
    run_phases(phases, args.output_dir, args.jobs, console)


def main(args: argparse.Namespace) -> None:
    console = Console()
    with_defaults(args)
    try:
        if not args.only_report:
            if search := searched(args):
                console.print(f"The search of rate and mu: {len(search)} runs")
                run_all(search, args, console)
            found = board(args)
            console.print(f"The board: {len(found.runs)} runs of {args.budget:,} tokens")
            run_all([*found.starts, *found.runs], args, console)
            if found.changed:
                console.print(f"One choice of d1 at a time: {len(found.changed)} runs")
                run_all([*found.changed], args, console)
    except PhaseError as error:
        raise RunError(f"{error} The same command continues from here.") from error
    finally:
        console.print(write_report(board(args), args.document), markup=False)


if __name__ == "__main__":
    run_script("studies.leaderboard.run", lambda: main(make_parser().parse_args()))
