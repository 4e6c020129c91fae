"""Does a fast sampler get to the exact sampler's final accuracy with 2.5 times less compute?

    python pocket/sampler_goal.py                     # two hours of a core; docs/fast_rollouts_goal.md
    python pocket/sampler_goal.py --split validation --seeds 0 1 --seconds 120 --learning_rate 1e-4
    python pocket/sampler_goal.py --only_report       # the tables of what is there

Each arm trains from SFT for a budget of its own, its rate falls to 0 over it, and only the last model is judged, by
the exact sampler. So nothing depends on where a noisy curve first crosses a line, as it does in `sampler_study.py`.
Results are lines of `results.jsonl` in the output folder. Killed? The same command continues.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from itertools import product
from pathlib import Path
from statistics import fmean

import numpy as np
from board_plan import ROOT
from board_results import table
from board_statistics import mean_of, percent, points
from pages import reading
from rich.console import Console
from sampler_outcomes import GOAL, SECONDS, TOKENS, Line, paired, solved
from sampler_runs import LASTING, NO_CURE, SHORT_BLOCKS, SURER, Run, check_numbers, run_missing

from d1.runs.entry import OneLineParser, run_script
from d1.show.tables import markdown_table

TASK, ESTIMATOR = "arithmetic", "tracerl"  # whose rollouts are four fifths of the compute
RATE = 2e-4
# The longest arm's seconds -> arm -> sampler, cure and processor seconds. The other arms spend 2.5 times fewer tokens
# or, where the name says so, seconds; a little less, since a run ends with the step it is in.
ARMS: dict[int, dict[str, tuple[str, str, float]]] = {
    120: {
        "exact": ("exact", NO_CURE, 120.0),
        "exact, fewer tokens": ("exact", NO_CURE, 46.0),
        "dual": ("cached+parallel", SURER, 59.0),
        "dual, fewer seconds": ("cached+parallel", SURER, 47.5),
        "dual, threshold 0.8": ("cached+parallel", SHORT_BLOCKS, 55.0),
        "lasting": ("cached+parallel", LASTING, 78.0),
    },
    240: {
        "exact": ("exact", NO_CURE, 240.0),
        "dual": ("cached+parallel", SURER, 118.0),
    },
}
DOCUMENT = ROOT / "docs" / "fast_rollouts_goal.md"


def make_parser() -> argparse.ArgumentParser:
    parser = OneLineParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=int, nargs="+", default=[*range(6, 14)], help="0 and 1 chose the rate")
    parser.add_argument("--seconds", type=int, nargs="+", default=[*ARMS], choices=[*ARMS], help="of the exact arm")
    parser.add_argument("--split", choices=["test", "validation"], default="test", help="problems to judge on")
    parser.add_argument("--learning_rate", type=float, default=RATE, help="that a run begins with")
    parser.add_argument("--share", type=float, default=1.0, help="of each arm's seconds, for a quick look")
    parser.add_argument("--limit", type=int, default=0, help="judge on so many problems; default: all")
    parser.add_argument("--output_dir", type=Path, default=ROOT / "runs" / "sampler_goal")
    parser.add_argument("--document", type=Path, help="default: docs/fast_rollouts_goal.md")
    parser.add_argument("--only_report", action="store_true", help="run nothing, write what is there")
    return parser


def planned(args: argparse.Namespace) -> list[Run]:
    """Seed by seed, so that what is cut short has all arms."""
    runs = []
    for seed, longest in product(args.seeds, args.seconds):
        for sampler, cure, seconds in ARMS[longest].values():
            budget = (args.learning_rate, args.share * seconds, 1, args.limit)
            runs.append(Run(TASK, sampler, ESTIMATOR, cure, seed, args.split, *budget, falling=True))
    return runs


Runs = dict[int, Line]  # by seed


def of_arms(lines: Sequence[Line], args: argparse.Namespace, longest: int, split: str) -> dict[float, dict[str, Runs]]:
    """Rate -> arm -> the lines of these arms and this split, among those of the share and the limit that `args` has;
    without runs whose loss or weights did not stay finite."""
    names = {(sampler, cure, args.share * seconds): name for name, (sampler, cure, seconds) in ARMS[longest].items()}
    found: dict[float, dict[str, Runs]] = {}
    for line in lines:
        run = Run(**line["run"])
        name = names.get((run.sampler, run.cure, run.seconds))
        if name is not None and (run.split, run.limit) == (split, args.limit) and not line["not_finite"]:
            found.setdefault(run.learning_rate, {}).setdefault(name, {})[run.seed] = line
    return {rate: {name: arms[name] for name in ARMS[longest] if name in arms} for rate, arms in sorted(found.items())}


def scores(runs: Runs) -> dict[int, np.ndarray]:
    """Seed -> (problems,) 1 where solved."""
    return {seed: solved(line["points"][-1]) for seed, line in runs.items()}


def spent(runs: Runs, seeds: Sequence[int], of: str) -> float:
    """The mean over seeds of seconds, of tokens or of steps."""
    return fmean(runs[seed]["points"][-1][of] for seed in seeds)


def by_its_own(runs: Runs, seeds: Sequence[int]) -> str:
    """Percent that the last models solve by the sampler of their own rollouts, where it is not the exact one."""
    found = [runs[seed]["own"] for seed in seeds if runs[seed]["own"]]
    return f"{100 * fmean(solved(point).mean() for point in found):.1f}" if found else ""


def arms_table(arms: dict[str, Runs]) -> str:
    """Of the seeds that an arm and the exact one both have."""
    rows, exact = [], arms.get("exact", {})
    for name, runs in arms.items():
        seeds = sorted(runs.keys() & exact.keys()) or sorted(runs)
        own = {seed: found for seed, found in scores(runs).items() if seed in seeds}
        row = [name, str(len(seeds)), percent(mean_of(table(own)))]
        row += [points(paired(scores(exact), own)) if name != "exact" and exact else "", by_its_own(runs, seeds)]
        fed = [log["sampling/forward_tokens"] for seed in seeds for log in runs[seed]["logs"]]
        row += [f"{fmean(fed):.0f}", f"{spent(runs, seeds, 'step'):.0f}"]
        for of, scale, digits in ((SECONDS, 1, 1), (TOKENS, 1e6, 2)):
            here = spent(runs, seeds, of)
            row += [f"{here / scale:.{digits}f}", f"{spent(exact, seeds, of) / here:.2f}" if exact else ""]
        rows.append(row)
    header = ["arm", "seeds", "solved, %", "less exact's", "by its own", "fed", "updates"]
    header += ["seconds", "fewer", "tokens, M", "fewer"]
    return markdown_table(header, rows)


def validation_table(by_rate: dict[float, dict[str, Runs]]) -> str:
    rows = []
    for rate, arms in by_rate.items():
        for name, runs in arms.items():
            each = ", ".join(f"{seed}: {100 * found.mean():.1f}" for seed, found in sorted(scores(runs).items()))
            rows.append([f"{rate:g}", name, each])
    return markdown_table(["rate at the start", "arm", "seed: solved, %"], rows)


def write_page(lines: Sequence[Line], args: argparse.Namespace, path: Path) -> str:
    """Writes the page; returns what to say."""
    text = HEAD.format(goal=GOAL, reading=reading(path))
    for longest in ARMS:
        for rate, arms in of_arms(lines, args, longest, "test").items():
            text += f"## Exact for {longest} seconds, test problems, rate {rate:g}\n\n{arms_table(arms)}\n"
        if looked_at := of_arms(lines, args, longest, "validation"):
            text += f"## Exact for {longest} seconds, validation problems\n\n{validation_table(looked_at)}\n"
    text += f"Runs that did not stay finite, and are in no table: {sum(bool(line['not_finite']) for line in lines)}.\n"
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)
    return f"Tables: {path}"


HEAD = """# A fast sampler with {goal} times less compute

Written by `python pocket/sampler_goal.py`. Word problems from SFT, with TraceRL's values and two views a completion:
rollouts are four fifths of this compute. Each arm trains for the processor seconds in the script's `ARMS`, its rate
falls linearly to 0 over them, and the last model is judged by the **exact** sampler, greedy. All rollouts, and the
judge, have blocks of 8. Fast arms are `cached+parallel`: the name says which cache, and the threshold is 0.95 where
it says none.

{reading}

- less exact's: paired by seeds and problems, with 95% intervals over both.
- by its own: percent that the last model solves, greedy, by the sampler of its own rollouts.
- fed: tokens that a completion's rollout fed through the body.
- tokens: through the body, backward counted twice, rollouts included, as in [the leaderboard](leaderboard.md).
- fewer: the exact arm's seconds, or tokens, over the row's.

"""


def check(args: argparse.Namespace) -> None:
    """Raises ValueError for a number out of its range."""
    check_numbers(args)
    if not 0 < args.share <= 1:
        raise ValueError("--share must be above 0 and at most 1")


def main(args: argparse.Namespace) -> None:
    check(args)
    console = Console()
    folder = args.output_dir.resolve()
    lines = run_missing([] if args.only_report else planned(args), folder, console)
    path = args.document or (DOCUMENT if not args.limit and args.share == 1 else folder / DOCUMENT.name)
    console.print(write_page(lines, args, path.resolve()), markup=False)


if __name__ == "__main__":
    run_script("sampler_goal.py", lambda: main(make_parser().parse_args()))
