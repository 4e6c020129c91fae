"""Programs per second in the sandbox, next to the interpreters alone: python -m benchmarks.programs --count 100

Each program is different and has three cases; as many run at a time as there are cores. "bare" starts the interpreter
twice per program, as the sandbox does, without bubblewrap, tests or limits. The two take turns.
"""

from __future__ import annotations

import argparse
import statistics
import subprocess
import sys
import time
from collections import defaultdict
from concurrent.futures import ThreadPoolExecutor
from itertools import count

from benchmarks.machine import as_markdown, describe
from d1.ranges import COUNT
from d1.runs.cli import OneLineParser, run_script
from d1.sandbox import WORKERS, Cases, shares_passed, working_python
from d1.tasks.code import with_cases

TESTS = "\n".join(f"assert f({x}) == {x * x}" for x in range(3))


def make_parser() -> argparse.ArgumentParser:
    parser = OneLineParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--count", type=COUNT, default=100, help="programs per round (default: %(default)s)")
    parser.add_argument("--repeats", type=COUNT, default=3, help="rounds (default: %(default)s)")
    return parser


def main(args: argparse.Namespace) -> None:
    python, numbers = working_python(), count()
    source, _, cases = with_cases(TESTS)
    tests = Cases(source, ("f",), cases)

    def sandboxed() -> None:
        programs = [f"def f(x):\n    return x * x  # {next(numbers)}" for _ in range(args.count)]
        shares = shares_passed(programs, [tests] * args.count)
        if min(shares) < 1:
            raise ValueError(f"{sum(share < 1 for share in shares)} of {args.count} right programs did not pass")

    def bare() -> None:
        with ThreadPoolExecutor(WORKERS) as pool:
            words = [[python, "-I", "-S", "-c", "pass"]] * (2 * args.count)
            list(pool.map(lambda command: subprocess.run(command, check=True), words))

    seconds: dict[str, list[float]] = defaultdict(list)
    for _ in range(args.repeats):
        for run in (bare, sandboxed):
            started = time.perf_counter()
            run()
            seconds[run.__name__].append(time.perf_counter() - started)
    results = {}
    for name, found in seconds.items():
        ratios = [mine / other for mine, other in zip(found, seconds["bare"], strict=True)]
        row = {"programs_per_second": args.count / statistics.median(found), "ratio": statistics.median(ratios)}
        results[name] = row | {"ratio_low": min(ratios), "ratio_high": max(ratios)}
    sys.stdout.write(as_markdown({"machine": describe(), "settings": vars(args), "results": results}))


if __name__ == "__main__":
    run_script("programs.py", lambda: main(make_parser().parse_args()))
