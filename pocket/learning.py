"""Do methods that are on no ranking yet learn? One run of each on a pocket task, before and after.

    python -m pocket.learning                # half an hour on two cores; writes pocket/learning.jsonl
    python -m pocket.learning --table        # the table of pocket/RESULTS.md, from that file

Protocol. Each method has one run, with the settings below and the seed 1. The learning rates were tried on validation
problems with the seed 0; no other setting was searched. Base and trained model answer the 512 test problems of the
task, greedy, at the length of training. A method learns if more problems change from wrong to right than from right to
wrong, by an exact sign test with p < .01. The runs say nothing about which method is better: tasks, models, steps and
rates differ.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import sys
from pathlib import Path
from typing import Any, NamedTuple

from rich.console import Console

from d1.eval.files import read_setups
from d1.eval.scores import compare, score_setup
from d1.eval.uncertainty import Z95
from d1.ranges import COUNT
from d1.runs.cli import OneLineParser
from d1.runs.tables import markdown_table
from pocket import careful_arithmetic
from pocket.phases import Phase, PhaseError, run_phases
from pocket.recipes import ROOT

DATA = ROOT / "pocket" / "learning.jsonl"
FOLDER = ROOT / "runs" / "learning"
SEED = 1
CAREFUL = str(ROOT / "pocket" / "careful_arithmetic.py")


class Run(NamedTuple):
    """The base's folder in pocket/, the task, the tokens of prompt and completion, and flags besides pocket.yaml."""

    base: str
    task: str
    prompt: int
    length: int
    flags: tuple[str, ...]


RUNS = {
    "dmpo": Run("base", "sudoku", 18, 32, ("--learning_rate", "2e-5", "--num_generations", "16", "--max_steps", "480")),
    "d-treerpo": Run(
        "base", "sudoku", 18, 32, ("--learning_rate", "3e-5", "--num_generations", "16", "--max_steps", "1440")
    ),
    "igpo": Run("arithmetic_base", CAREFUL, 24, 40, ("--learning_rate", "1e-4", "--max_steps", "240")),
    "slim-rl": Run("block_base", "sudoku", 18, 32, ("--learning_rate", "1e-4", "--max_steps", "160")),
    "lightning-rl": Run("block_base", "sudoku", 18, 32, ("--learning_rate", "1e-4", "--max_steps", "160")),
}


def evaluation(name: str, model: Path, run: Run, needs: tuple[str, ...] = ()) -> Phase:
    # Relative, so that the generation files contain no absolute paths.
    flags = ["--model_path", os.path.relpath(model, ROOT / "eval"), "--dataset", run.task, "--batch_size", "128"]
    flags += ["--gen_length", str(run.length), "--block_length", "8", "--diffusion_steps", str(run.length // 2)]
    flags += ["--output_dir", str(FOLDER / f"{name}-generations")]
    return Phase(f"{name}-evaluated", [sys.executable, "eval.py", *flags], ROOT / "eval", weight=20, needs=needs)


def phases_of(methods: list[str]) -> list[Phase]:
    phases = []
    for method in methods:
        run = RUNS[method]
        base = ROOT / "pocket" / run.base
        folder = FOLDER / method
        flags = ["--config", "pocket.yaml", "--method", method, "--model_path", str(base), "--dataset", run.task]
        flags += ["--max_prompt_length", str(run.prompt), "--max_completion_length", str(run.length)]
        flags += ["--diffusion_steps", str(run.length // 2), "--seed", str(SEED), "--output_dir", str(folder)]
        flags += ["--resume_from_checkpoint", "true", *run.flags]
        command = [sys.executable, "diffu_grpo_train.py", *flags]
        phases.append(Phase(method, command, ROOT / "diffu-grpo", weight=200))
        phases.append(evaluation(f"{method}-before", base, run))
        phases.append(evaluation(f"{method}-after", folder, run, needs=(method,)))
    return phases


def measure(method: str) -> dict[str, Any]:
    """Problems solved before and after, and those that changed."""
    scored = []
    for state in ("before", "after"):
        (setup,) = read_setups(FOLDER / f"{method}-{state}-generations")
        row, details = score_setup(setup, "strict", {"careful_arithmetic": careful_arithmetic})
        if not row.complete:
            raise ValueError(f"{method}, {state}: the evaluation is not complete: {'; '.join(row.errors)}")
        scored.append(details)
    paired = compare("before", scored[0], "after", scored[1])
    return {
        "method": method,
        "base": RUNS[method].base,
        "flags": " ".join(RUNS[method].flags),
        "problems": paired["shared"],
        "before": paired["accuracy_a"],
        "after": paired["accuracy_b"],
        "gained": paired["b_better"],
        "lost": paired["a_better"],
        "p": paired["p_value"],
    }


def difference(row: dict[str, Any]) -> str:
    """Points of a paired difference of shares, with its 95% interval (Wald's, for paired answers)."""
    n, gained, lost = row["problems"], row["gained"], row["lost"]
    half = Z95 * math.sqrt(gained + lost - (gained - lost) ** 2 / n) / n
    mean = (gained - lost) / n
    return f"{100 * mean:+.1f} [{100 * (mean - half):+.1f}, {100 * (mean + half):+.1f}]"


def table() -> str:
    """The measured methods as a table of markdown."""
    lines = []
    for text in DATA.read_text().splitlines():
        row = json.loads(text)
        cells = [f"`{row['method']}`", row["base"], f"`{row['flags']}`", f"{row['before']:.1f}", f"{row['after']:.1f}"]
        lines.append([*cells, difference(row), f"{row['gained']} / {row['lost']}", f"{row['p']:.1g}"])
    head = ["method", "base", "flags besides pocket.yaml", "before, %", "after, %", "difference [95%]"]
    return markdown_table([*head, "gained / lost", "sign test p"], lines)


def make_parser() -> argparse.ArgumentParser:
    parser = OneLineParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--methods", nargs="+", choices=[*RUNS], default=[*RUNS], help="default: all")
    parser.add_argument("--jobs", type=COUNT, default=2, help="commands run at the same time")
    parser.add_argument(
        "--table", action="store_true", help="print the table of the measured methods, and train nothing"
    )
    return parser


def main(args: argparse.Namespace) -> None:
    if args.table:
        sys.stdout.write(table())
        return
    run_phases(phases_of(args.methods), FOLDER, args.jobs, Console())
    rows = {}
    if DATA.exists():
        rows = {row["method"]: row for row in map(json.loads, DATA.read_text().splitlines())}
    for method in args.methods:
        rows[method] = measure(method)
    DATA.write_text("".join(json.dumps(rows[method]) + "\n" for method in RUNS if method in rows))
    sys.stdout.write(table())


if __name__ == "__main__":
    try:
        main(make_parser().parse_args())
    except (PhaseError, ValueError, OSError) as error:
        sys.exit(f"learning.py: {error}")
    except KeyboardInterrupt:
        sys.exit("Stopped. Run the same command to continue.")
