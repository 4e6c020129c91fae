"""Does the order of methods hold as models grow? PROTOCOL.md has the protocol.

    OMP_NUM_THREADS=1 python -m studies.ladder.run              # all stages, width by width
    OMP_NUM_THREADS=1 python -m studies.ladder.run --widths 64  # only these widths
    OMP_NUM_THREADS=1 python -m studies.ladder.run --again      # five seeds of the first width again, on this machine

For each width: the bases, the rates, the test. The first width is the pilot. A line per base and run goes to data/. If
the command is killed, run it again: what was killed starts anew. Several processes share the work, and a GPU if there
is one.
"""

from __future__ import annotations

import argparse
import logging
import os
import shutil
from collections.abc import Iterable, Mapping
from functools import partial
from itertools import product
from pathlib import Path
from statistics import fmean
from typing import Any

import torch

from d1.runs.cli import OneLineParser, run_script
from d1.runs.record import run_record
from pocket.uncertainty import LEAST_SEEDS
from studies.json_lines import complete, read_lines
from studies.ladder.bases import BASES, CANVAS, DATA, DEVICE, PROMPT, WIDTHS, base_model, make_bases, problem_files
from studies.leaderboard.plan import accuracy
from studies.leaderboard.run import commit, evaluate, logs_of, train_from

# Row -> its flags of RL. The updates per rollout are those that the leaderboard's search chose for word problems.
ROWS = {
    "d1": "--method d1 --num_iterations 4",
    "d1, prompt shown": "--method d1 --num_iterations 4 --p_mask_prompt 0",
    "coupled-grpo": "--method coupled-grpo --num_iterations 1",
    "tracerl": "--method tracerl --num_iterations 2",
    "tracerl, threshold": "--method tracerl --num_iterations 2 --temperature 1 --sampler parallel --reveal threshold "
    "--reveal_level 0.9",
    "rldf": "--method rldf --num_iterations 1",
}
SAME = "--dataset arithmetic --per_device_train_batch_size 32 --num_generations 8 --block_length 8"
SAME += " --lr_scheduler_type linear --warmup_steps 0"
RATES = (1e-5, 3e-5, 1e-4, 3e-4, 1e-3)  # at the first width; 1 / width times as large at the others
FACTORS = (1.0, 1 / 3, 3.0)  # of the scaled rate, checked at the other widths
MARGIN = 0.04  # by which another factor's accuracy must be higher
SEARCH_SEEDS, SEEDS = (410, 411), tuple(range(400, 408))
BUDGET = 2_000_000  # compute tokens of a run
LEAST_GAIN = 0.05  # of the best row of the search over its base, or no other run starts
# Problems judged, and views scored, at a time: the fastest on this hardware; they change rounding only.
JUDGED_AT_ONCE, VIEWS_AT_ONCE = (400, 64) if DEVICE == "cuda" else (32, 16)

SEARCH, CHECKS, RUNS, AGAIN = (DATA / f"{name}.jsonl" for name in ("search", "checks", "runs", "again"))

Lines = list[dict[str, Any]]


def settings(row: str, seed: int, rate: float, budget: int = BUDGET) -> list[str]:
    """The flags of RL that define a run, in addition to pocket.yaml's, without files."""
    flags: list[object] = [*ROWS[row].split(), *SAME.split(), "--seed", seed, "--learning_rate", rate]
    flags += ["--max_prompt_length", PROMPT, "--max_completion_length", CANVAS, "--diffusion_steps", CANVAS // 2]
    flags += ["--lr_scheduler_kwargs", "{}", "--views_at_once", VIEWS_AT_ONCE]
    return [*map(str, flags), "--max_compute_tokens", str(budget), "--max_steps", str(budget)]


def judged(model: Path, problems: Path, folder: Path) -> dict[str, str]:
    """Whether a model solves each problem of a file, as "0110...", and a hash of the problems: greedy, two per step."""
    flags = ["--gen_length", CANVAS, "--data_file", problems, "--batch_size", JUDGED_AT_ONCE]
    return evaluate("arithmetic", model, folder, flags)


def line(run: Mapping[str, Any], rate: float, folder: Path, problems: str, budget: int = BUDGET) -> dict[str, Any]:
    """Trains and judges a run on a split. A model that did not stay finite has solved nothing."""
    files, own = problem_files(folder), folder / "-".join(map(str, run.values())).replace(" ", "_")
    start = base_model(run["width"], run["base"], folder)
    shutil.rmtree(own, ignore_errors=True)  # left by a killed run
    flags = settings(run["row"], run["seed"], rate, budget)
    error = train_from(start, own, ["--data_file", str(files["train"]), *flags])
    found: dict[str, Any] = {**judged(start if error else own, files[problems], own / "judged")}
    right = "0" * len(found["right"]) if error else found["right"]
    costs = logs_of(own)
    shutil.rmtree(own)
    found |= {"rate": rate, "settings": flags, "error": error, **costs, "right": right}
    return found | {"commit": commit(), **run_record()}


def means_of(lines: Lines, values: Iterable[float], name: str, seeds: int) -> dict[float, float]:
    """Value of `name` -> mean accuracy of its runs.

    Raises:
        ValueError: a value has fewer than `seeds` runs.
    """
    found = {value: [accuracy(line["right"]) for line in lines if line[name] == value] for value in values}
    if missing := [value for value, of in found.items() if len(of) < seeds]:
        raise ValueError(f"the search of rates is not complete: {name} {missing[0]:.3g} lacks runs, run it first")
    return {value: fmean(of) for value, of in found.items()}


def scaled_rate(row: str, width: int, searched: Lines) -> float:
    """The rate of the search with the highest mean, of equal ones the smallest, times the first width / width."""
    means = means_of([line for line in searched if line["row"] == row], RATES, "rate", len(SEARCH_SEEDS))
    return max(RATES, key=lambda rate: (means[rate], -rate)) * WIDTHS[0] / width


def check_headroom(searched: Lines, start: float) -> None:
    """Raises ValueError if the search's best row gains too little over the share that the base solves."""
    found = {row: [line for line in searched if line["row"] == row] for row in ROWS}
    best = max(max(means_of(lines, RATES, "rate", len(SEARCH_SEEDS)).values()) for lines in found.values())
    if best < start + LEAST_GAIN:
        raise ValueError(
            f"the best row of the search solves {best:.3f}, its base {start:.3f}: raise BUDGET in {__file__}, "
            "and say so in PROTOCOL.md, before any run of the test"
        )


def chosen_rate(row: str, width: int, searched: Lines, checked: Lines) -> float:
    """The scaled rate; at other widths than the first, times the best factor if it is better by more than `MARGIN`."""
    rate = scaled_rate(row, width, searched)
    if width == WIDTHS[0]:
        return rate
    own = [line for line in checked if (line["row"], line["width"]) == (row, width)]
    means = means_of(own, FACTORS, "factor", 1)
    top = max(FACTORS, key=lambda factor: means[factor])
    return rate * (top if means[top] > means[1.0] + MARGIN else 1.0)


def searches() -> list[dict[str, Any]]:
    each = product(SEARCH_SEEDS, ROWS, RATES)
    return [{"width": WIDTHS[0], "base": 0, "row": row, "seed": seed, "rate": rate} for seed, row, rate in each]


def checks(width: int) -> list[dict[str, Any]]:
    each = product(ROWS, FACTORS)
    seed = SEARCH_SEEDS[0]
    return [{"width": width, "base": 0, "row": row, "seed": seed, "factor": factor} for row, factor in each]


def runs(width: int) -> list[dict[str, Any]]:
    """The runs of the test, seed by seed, so that an incomplete study has all rows and bases."""
    return [{"width": width, "base": base, "row": row, "seed": seed} for seed, base, row in product(SEEDS, BASES, ROWS)]


def again() -> list[dict[str, Any]]:
    """The first width with the least seeds of a test."""
    return [run for run in runs(WIDTHS[0]) if run["seed"] in SEEDS[:LEAST_SEEDS]]


def make_parser() -> argparse.ArgumentParser:
    parser = OneLineParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--widths", type=int, nargs="+", choices=WIDTHS, default=WIDTHS, help="default: all, in order")
    parser.add_argument("--again", action="store_true", help="five seeds of the first width, into data/again.jsonl")
    parser.add_argument("--output_dir", default="runs/ladder", help="of the models (default: %(default)s)")
    return parser


def searched(run: Mapping[str, Any], folder: Path) -> dict[str, Any]:
    return line(run, run["rate"], folder, "validation")


def checked(run: Mapping[str, Any], folder: Path) -> dict[str, Any]:
    rate = scaled_rate(run["row"], run["width"], read_lines(SEARCH))
    return line(run, run["factor"] * rate, folder, "validation")


def tested(run: Mapping[str, Any], folder: Path) -> dict[str, Any]:
    rate = chosen_rate(run["row"], run["width"], read_lines(SEARCH), read_lines(CHECKS))
    return line(run, rate, folder, "test")


def main(args: argparse.Namespace) -> None:
    if DEVICE == "cuda":  # runs then repeat to the bit on the same kind of GPU, as they do on a CPU
        os.environ["CUBLAS_WORKSPACE_CONFIG"] = ":4096:8"
        torch.use_deterministic_algorithms(True)
    folder = Path(args.output_dir).resolve()
    problem_files(folder)
    if args.again:
        complete(AGAIN, again(), folder, partial(tested, folder=folder))
        return
    for width in args.widths:
        make_bases(width, folder)
        if width == WIDTHS[0]:
            complete(SEARCH, searches(), folder, partial(searched, folder=folder))
            (first,) = (
                line for line in read_lines(DATA / "bases.jsonl") if (line["width"], line["base"]) == (width, 0)
            )
            check_headroom(read_lines(SEARCH), first["solved"][-1])
        else:
            complete(CHECKS, checks(width), folder, partial(checked, folder=folder))
        complete(RUNS, runs(width), folder, partial(tested, folder=folder))


if __name__ == "__main__":
    logging.basicConfig(level=logging.INFO, format="%(message)s")
    run_script("studies.ladder.run", lambda: main(make_parser().parse_args()))
