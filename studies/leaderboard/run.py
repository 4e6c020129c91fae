"""Compare RL methods at the same compute: do the runs of PROTOCOL.md that are not in data/ yet.

    python -m studies.leaderboard.run --jobs 2 --hours 8    # start no run after eight hours
    python -m studies.leaderboard.run --setups sudoku-sft   # only one setup
    python -m studies.leaderboard.run --part way            # another part of the protocol, after the board's search
    python -m studies.leaderboard.run --quick               # a few minutes, in runs/leaderboard_quick

First it searches each method's learning rate and number of updates, then it does the final runs, seed by seed. If it is
killed (even with -9), run the same command to continue; the run in progress starts again.
"""

from __future__ import annotations

import argparse
import fcntl
import multiprocessing
import os
import threading
import time
from concurrent.futures import FIRST_COMPLETED, Future, ProcessPoolExecutor, wait
from concurrent.futures.process import BrokenProcessPool
from dataclasses import replace
from multiprocessing.connection import wait as wait_for
from pathlib import Path

from rich.console import Console

from d1.ranges import COUNT, POSITIVE
from d1.runs.cli import OneLineParser, RunError, run_script
from pocket.phases import ENVIRONMENT
from pocket.recipes import ROOT
from studies.leaderboard.parts import PARTS, WIDTH
from studies.leaderboard.plan import ALL_TASKS, QUICK, SETUPS, Protocol, Run
from studies.leaderboard.results import DATA, read_results

RUNS_PER_PROCESS = 25  # then a new process replaces it, so that memory leaks cannot grow


def make_parser() -> argparse.ArgumentParser:
    parser = OneLineParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--jobs", type=COUNT, default=min(2, os.cpu_count() or 1), help="runs at the same time")
    parser.add_argument("--hours", type=POSITIVE, help="start no run later than this; default: until all are done")
    parser.add_argument("--setups", nargs="+", choices=[*SETUPS], metavar="SETUP", help=f"default: {' '.join(SETUPS)}")
    parser.add_argument("--part", choices=[*PARTS], default="board", help="default: board")
    parser.add_argument("--quick", action="store_true", help="two methods, one setup, one seed, one rate")
    parser.add_argument("--output_dir", type=Path, help="folder for models in use; default: runs/leaderboard")
    return parser


def begin(folder: Path) -> None:
    """Initialises a process of the pool: it writes to its own log, and ends when the runner ends for any reason."""
    parent = multiprocessing.parent_process()
    assert parent is not None

    def follow() -> None:
        wait_for([parent.sentinel])
        os._exit(1)

    threading.Thread(target=follow, daemon=True).start()
    log = (folder / f"{multiprocessing.current_process().name}.log").open("a")
    os.dup2(log.fileno(), 1)
    os.dup2(log.fileno(), 2)


def do(run: Run, folder: Path, data: Path, protocol: Protocol) -> str:
    """Does a run in a process of the pool; returns a message about it."""
    from studies.leaderboard.one_run import complete  # only there: it imports torch

    started = time.monotonic()
    line = complete(run, folder, data, protocol)
    return f"{time.monotonic() - started:.0f} s" + ", diverged" * line.get("diverged", False)


def work(protocol: Protocol, folder: Path, data: Path, jobs: int, hours: float | None, console: Console) -> list[Run]:
    """Does the missing runs; returns those that failed, which a second call tries again.

    Raises:
        RunError: a process of the pool was killed, or another runner uses `folder`.
    """
    os.environ.update(ENVIRONMENT)
    folder.mkdir(parents=True, exist_ok=True)
    started, done = time.monotonic(), 0
    failed: list[Run] = []
    running: dict[Future[str], Run] = {}
    with (folder / "lock").open("a") as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise RunError(f"another runner is using {folder}: wait for it, or choose another --output_dir") from None
        spawn = multiprocessing.get_context("spawn")
        with ProcessPoolExecutor(
            jobs, spawn, initializer=begin, initargs=(folder,), max_tasks_per_child=RUNS_PER_PROCESS
        ) as pool:
            while True:
                late = hours is not None and time.monotonic() - started > 3600 * hours
                known = [*running.values(), *failed]
                todo = [] if late else [run for run in protocol.missing(read_results(data)) if run not in known]
                for run in todo[: jobs - len(running)]:
                    running[pool.submit(do, run, folder, data, protocol)] = run
                if not running:
                    return failed
                for future in wait(running, return_when=FIRST_COMPLETED).done:
                    run, done = running.pop(future), done + 1
                    try:
                        said = future.result()
                    except BrokenProcessPool:
                        raise RunError(f"{run.name} was killed: run the same command to continue") from None
                    except Exception as error:  # one failed run must not end a long series
                        failed.append(run)
                        said = f"failed: {type(error).__name__}: {error}"
                    hour = (time.monotonic() - started) / 3600
                    console.print(
                        f"{hour:6.2f} h, {done} runs, {len(todo)} can start: {run.name}: {said}", markup=False
                    )


def check_bases(protocol: Protocol) -> None:
    """Raises FileNotFoundError if a base model is missing."""
    for task in (ALL_TASKS[setup.task] for setup in protocol.setups):
        if not (task.base / "config.json").exists():
            make = f"python -m pocket.make_base --task {task.recipe} --hidden_size {WIDTH} --output_dir {task.base}"
            raise FileNotFoundError(f"no base model {task.base}: make it with {make} (half an hour)")


def main(args: argparse.Namespace) -> None:
    console = Console(soft_wrap=True)
    if args.setups and args.part != "board":
        raise ValueError(f"--setups chooses setups of the board: leave it out with --part {args.part}")
    protocol = QUICK if args.quick else PARTS[args.part](read_results())
    protocol = replace(protocol, setups=tuple(SETUPS[name] for name in args.setups)) if args.setups else protocol
    check_bases(protocol)
    folder = (args.output_dir or ROOT / "runs" / f"leaderboard{'_quick' * args.quick}").resolve()
    failed = work(protocol, folder, folder / "data" if args.quick else DATA, args.jobs, args.hours, console)
    if failed:
        raise RunError(f"{len(failed)} runs failed, the first {failed[0].name}: see {folder}/*.log")


if __name__ == "__main__":
    run_script("studies.leaderboard.run", lambda: main(make_parser().parse_args()))
