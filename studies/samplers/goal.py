"""Test whether a fast sampler reaches the exact sampler's final accuracy with 2.5 times less compute.

    python -m studies.samplers.goal                     # 80 minutes on one core; docs/fast_rollouts_goal.md
    python -m studies.samplers.goal --split validation --seeds 0 1 2 3 --steps 100 --arms exact lasting
    python -m studies.samplers.goal --only_report       # the tables of existing results

Each arm starts from SFT and trains for a fixed number of steps, over which its learning rate falls to 0. Only the last
model is judged, by the exact sampler. So, unlike in `run.py`, nothing depends on where a noisy curve first crosses a
line, or on how fast or busy the machine is.
Results are lines of `results.jsonl` in the output folder. If the study is killed, run the same command to continue.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from itertools import product
from pathlib import Path
from statistics import fmean
from typing import NamedTuple

import numpy as np
from rich.console import Console

from d1.runs.entry import OneLineParser, run_script
from d1.show.tables import markdown_table
from pocket.uncertainty import mean_of
from studies.leaderboard.plan import ROOT
from studies.leaderboard.statistics import percent, points, table
from studies.pages import reading
from studies.samplers.outcomes import GOAL, SECONDS, TOKENS, Line, paired, solved, solved_by_own
from studies.samplers.runs import LASTING, NO_CURE, PREFIX, SURER, Run, check_numbers, run_missing

TASK, ESTIMATOR = "arithmetic", "tracerl"  # here rollouts are four fifths of the compute
RATE = 2e-4


class Arm(NamedTuple):
    """The settings that the runs of an arm share; the fields are those of `Run`."""

    sampler: str
    cure: str
    steps: int


# Steps of the exact arm -> name -> arm. The other arms use about 2.5 times fewer tokens.
ARMS: dict[int, dict[str, Arm]] = {
    50: {
        "exact": Arm("exact", NO_CURE, 50),
        "exact, fewer tokens": Arm("exact", NO_CURE, 19),
        "prefix": Arm("cached+parallel", PREFIX, 48),
        "dual": Arm("cached+parallel", SURER, 51),
        "lasting": Arm("cached+parallel", LASTING, 87),
    },
    100: {  # the two most important arms, near the highest accuracy that RL reaches
        "exact": Arm("exact", NO_CURE, 100),
        "lasting": Arm("cached+parallel", LASTING, 174),
    },
}
DOCUMENT = ROOT / "docs" / "fast_rollouts_goal.md"


def make_parser() -> argparse.ArgumentParser:
    parser = OneLineParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=int, nargs="+", default=[*range(20, 28)], help="lower seeds chose the arms")
    parser.add_argument("--steps", type=int, nargs="+", default=[*ARMS], choices=[*ARMS], help="steps of the exact arm")
    parser.add_argument("--arms", nargs="+", default=[*ARMS[50]], choices=[*ARMS[50]])
    parser.add_argument("--split", choices=["test", "validation"], default="test", help="problems to judge on")
    parser.add_argument("--learning_rate", type=float, default=RATE, help="learning rate at the start of a run")
    parser.add_argument("--share", type=float, default=1.0, help="share of each arm's steps to do, for a quick look")
    parser.add_argument("--limit", type=int, default=0, help="judge on this number of problems; default: all")
    parser.add_argument("--output_dir", type=Path, default=ROOT / "runs" / "sampler_goal")
    parser.add_argument("--document", type=Path, help="default: docs/fast_rollouts_goal.md")
    parser.add_argument("--only_report", action="store_true", help="run nothing, report existing results")
    return parser


def cut(arm: Arm, share: float) -> Arm:
    """The arm with this share of its steps."""
    return arm._replace(steps=max(1, round(share * arm.steps)))


def run_of(arm: Arm, seed: int, args: argparse.Namespace) -> Run:
    sampler, cure, steps = cut(arm, args.share)
    setup = (TASK, sampler, ESTIMATOR, cure, seed, args.split, args.learning_rate)
    return Run(*setup, seconds=0.0, points=1, limit=args.limit, steps=steps)


def planned(args: argparse.Namespace) -> list[Run]:
    """The runs, seed by seed, so that an incomplete study has all arms."""
    each = product(args.seeds, args.steps, args.arms)
    return [run_of(ARMS[steps][name], seed, args) for seed, steps, name in each if name in ARMS[steps]]


Runs = dict[int, Line]  # by seed


def of_arms(lines: Sequence[Line], args: argparse.Namespace, steps: int, split: str) -> dict[float, dict[str, Runs]]:
    """Learning rate -> arm -> lines of this split, with the share and the limit in `args`; without runs whose loss or
    weights did not stay finite."""
    found: dict[float, dict[str, Runs]] = {}
    for line in lines:
        run = Run(**line["run"])
        if line["not_finite"] or (run.split, run.limit) != (split, args.limit):
            continue
        for name, arm in ARMS[steps].items():
            if Arm(run.sampler, run.cure, run.steps) == cut(arm, args.share):
                found.setdefault(run.learning_rate, {}).setdefault(name, {})[run.seed] = line
    return {rate: {name: arms[name] for name in ARMS[steps] if name in arms} for rate, arms in sorted(found.items())}


def scores(runs: Runs) -> dict[int, np.ndarray]:
    """Seed -> (problems,), 1 if solved."""
    return {seed: solved(line["points"][-1]) for seed, line in runs.items()}


def spent(runs: Runs, seeds: Sequence[int], of: str) -> float:
    """The mean over seeds of the seconds, tokens or steps that a run used."""
    return fmean(runs[seed]["points"][-1][of] for seed in seeds)


def arms_table(arms: dict[str, Runs]) -> str:
    """One row per arm, over the seeds that the arm shares with the exact arm."""
    rows, exact = [], arms.get("exact", {})
    for name, runs in arms.items():
        seeds = sorted(runs.keys() & exact.keys()) or sorted(runs)
        own = {seed: found for seed, found in scores(runs).items() if seed in seeds}
        row = [name, str(len(seeds)), percent(mean_of(table(own)))]
        row += [points(paired(scores(exact), own)) if name != "exact" and exact else ""]
        by_own = solved_by_own(runs[seed] for seed in seeds)
        row += ["" if by_own is None else f"{100 * by_own:.1f}"]
        processed = [log["sampling/forward_tokens"] for seed in seeds for log in runs[seed]["logs"]]
        row += [f"{fmean(processed):.0f}", f"{spent(runs, seeds, 'step'):.0f}"]
        for of, scale, digits in ((SECONDS, 1, 1), (TOKENS, 1e6, 2)):
            here = spent(runs, seeds, of)
            row += [f"{here / scale:.{digits}f}", f"{spent(exact, seeds, of) / here:.2f}" if exact else ""]
        rows.append(row)
    header = ["arm", "seeds", "solved, %", "difference to exact", "own sampler, %", "per completion", "updates"]
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
    """Writes the page; returns a message."""
    text = HEAD.format(goal=GOAL, reading=reading(path))
    for steps in ARMS:
        for rate, arms in of_arms(lines, args, steps, "test").items():
            text += f"## Exact for {steps} steps, test problems, rate {rate:g}\n\n{arms_table(arms)}\n"
        if looked_at := of_arms(lines, args, steps, "validation"):
            text += f"## Exact for {steps} steps, validation problems\n\n{validation_table(looked_at)}\n"
    text += f"Runs that did not stay finite, and are in no table: {sum(bool(line['not_finite']) for line in lines)}.\n"
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)
    return f"Tables: {path}"


HEAD = """# A fast sampler with {goal} times less compute

Written by `python -m studies.samplers.goal`. The task is word problems, from SFT, with TraceRL's values and two views
per completion; here rollouts are four fifths of the compute. Each arm trains for the steps in the script's `ARMS`,
while its learning rate falls to 0, and the last model is judged by the **exact** sampler, greedy. All rollouts and the
judge use blocks of 8. Fast arms are `cached+parallel` with threshold 0.95, named after their cache.

{reading}

- difference to exact: difference to the exact arm, paired by seeds and problems, with 95% intervals over both.
- own sampler: percent that the last model solves, greedy, with the sampler of its own rollouts.
- per completion: tokens processed by the transformer per completion of a rollout.
- tokens: all tokens processed by the transformer, including rollouts; backward passes count twice, as in
  [the leaderboard](leaderboard.md).
- fewer: the exact arm's seconds, or tokens, divided by the row's.

"""


def check(args: argparse.Namespace) -> None:
    """Raises ValueError for a number out of its range, or if a number of steps has none of the arms."""
    check_numbers(args)
    for steps in args.steps:
        if not any(name in ARMS[steps] for name in args.arms):
            raise ValueError(f"--steps {steps} needs one of its --arms: {', '.join(ARMS[steps])}")
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
    run_script("studies.samplers.goal", lambda: main(make_parser().parse_args()))
