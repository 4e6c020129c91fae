"""What makes a method better: four ideas, with and without each, at the same compute. PROTOCOL.md has the protocol.

    OMP_NUM_THREADS=1 python -m studies.factorial.run     # the search of the rates, then the test

A line per run goes to data/. If the command is killed, run it again; several processes share the work.
"""

from __future__ import annotations

import argparse
import logging
import shutil
from collections.abc import Mapping
from itertools import product
from pathlib import Path
from typing import Any

from d1.runs.cli import OneLineParser, run_script
from d1.runs.record import run_record
from dataset.make_problems import write_rows
from studies.json_lines import complete, read_lines
from studies.samplers.measure import NEW
from studies.training import SETUPS, TASKS, best_rate, commit, evaluate, logs_of, make_start, train_from

DATA = Path(__file__).parent / "data"
STUDIED = ("sudoku-sft", "arithmetic-sft")
# Idea -> the flags of RL without it and with it. All other settings are the same in all cells.
IDEAS = {
    "prompt": ("--p_mask_prompt 0.15", "--p_mask_prompt 0"),
    "advantages": ("--advantage trl", "--advantage standardised --right_share 0.2 0.8"),
    "rollouts": (
        "--temperature 0.9",
        "--temperature 1 --sampler parallel --reveal threshold --reveal_level 0.9",
    ),
    "replay": ("--estimator one_step", "--estimator segments --segments 4"),
}
SAME = "--method d1 --objective clipped_views --loss_type views --epsilon 0.2 --kl k3_to_old --beta 0.01"
SAME += " --num_iterations 4 --max_grad_norm 1 --num_generations 8 --lr_scheduler_type linear --warmup_steps 0"
CELLS = tuple(
    "+".join(name for name, there in zip(IDEAS, cell, strict=True) if there) or "none"
    for cell in product((False, True), repeat=len(IDEAS))
)
RATES = (3e-5, 1e-4, 3e-4)
SEARCH_SEEDS, SEEDS = (310, 311), tuple(range(300, 308))
BUDGET = 1_500_000  # compute tokens of a run
PROBLEMS, PROBLEM_SEED = 1000, 11  # new ones, which judge the test


def settings(run: Mapping[str, Any], rate: float, budget: int = BUDGET) -> list[str]:
    """The flags of RL that define a run, in addition to pocket.yaml's."""
    task, ideas = TASKS[SETUPS[run["setup"]].task], run["cell"].split("+")
    flags: list[object] = [*SAME.split()]
    for name, (without, with_it) in IDEAS.items():
        flags += (with_it if name in ideas else without).split()
    flags += ["--dataset", task.dataset, *task.flags, "--block_length", 8, "--diffusion_steps", task.length // 2]
    flags += ["--seed", run["seed"], "--learning_rate", rate, "--lr_scheduler_kwargs", "{}", "--views_at_once", 64]
    return [*map(str, flags), "--max_compute_tokens", str(budget), "--max_steps", str(budget)]


def line(run: Mapping[str, Any], rate: float, folder: Path, judge: list[str], budget: int = BUDGET) -> dict[str, Any]:
    """Trains and judges a run; `judge` has flags of evaluation. A model that did not stay finite has solved nothing."""
    setup, own = SETUPS[run["setup"]], folder / "-".join(map(str, run.values()))
    start = make_start(folder, setup, run["seed"])
    shutil.rmtree(own, ignore_errors=True)  # left by a killed run
    flags = settings(run, rate, budget)
    error = train_from(start, own, flags)
    found: dict[str, Any] = {**evaluate(setup.task, start if error else own, own / "judged", judge)}
    right = "0" * len(found["right"]) if error else found["right"]
    costs = logs_of(own)
    shutil.rmtree(own)
    found |= {"rate": rate, "settings": flags, "error": error, **costs, "right": right}
    return found | {"commit": commit(), **run_record()}


def chosen(setup: str, cell: str, lines: list[dict[str, Any]]) -> float:
    """The rate that the search found for a cell; ValueError if its search is not complete."""
    own = (line for line in lines if (line["setup"], line["cell"]) == (setup, cell))
    return best_rate(own, RATES, len(SEARCH_SEEDS), f"{setup}, {cell}")


def searches() -> list[dict[str, Any]]:
    each = product(SEARCH_SEEDS, STUDIED, CELLS, RATES)
    return [{"setup": setup, "cell": cell, "seed": seed, "rate": rate} for seed, setup, cell, rate in each]


def runs() -> list[dict[str, Any]]:
    """The runs of the test, seed by seed, so that an incomplete study has all cells."""
    return [{"setup": setup, "cell": cell, "seed": seed} for seed, setup, cell in product(SEEDS, STUDIED, CELLS)]


def problems_of(setup: str, folder: Path) -> list[str]:
    """Flags of evaluation on new problems, which are written into `folder`."""
    task = SETUPS[setup].task
    file = folder / f"{task}.jsonl"
    if not file.exists():
        write_rows(file, NEW[task](PROBLEMS, PROBLEM_SEED))
    return ["--data_file", str(file)]


def start_line(run: Mapping[str, Any], folder: Path, judge: list[str]) -> dict[str, Any]:
    """What the SFT model of a seed solves, from which all cells of the seed start."""
    setup, own = SETUPS[run["setup"]], folder / "-".join(map(str, ("start", *run.values())))
    start = make_start(folder, setup, run["seed"])
    found = evaluate(setup.task, start, own / "judged", judge)
    shutil.rmtree(own)
    return {**found, "commit": commit(), **run_record()}


def starts() -> list[dict[str, Any]]:
    return [{"setup": setup, "seed": seed} for seed, setup in product(SEEDS, STUDIED)]


def make_parser() -> argparse.ArgumentParser:
    parser = OneLineParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--output_dir", default="runs/factorial", help="of the models (default: %(default)s)")
    return parser


def main(args: argparse.Namespace) -> None:
    folder = Path(args.output_dir).resolve()
    folder.mkdir(parents=True, exist_ok=True)
    judge = ["--split", "validation"]
    complete(DATA / "search.jsonl", searches(), folder, lambda run: line(run, run["rate"], folder, judge))
    found = read_lines(DATA / "search.jsonl")

    def tested(run: Mapping[str, Any]) -> dict[str, Any]:
        return line(run, chosen(run["setup"], run["cell"], found), folder, problems_of(run["setup"], folder))

    complete(DATA / "runs.jsonl", runs(), folder, tested)

    def started(run: Mapping[str, Any]) -> dict[str, Any]:
        return start_line(run, folder, problems_of(run["setup"], folder))

    complete(DATA / "starts.jsonl", starts(), folder, started)


if __name__ == "__main__":
    logging.basicConfig(level=logging.INFO, format="%(message)s")
    run_script("studies.factorial.run", lambda: main(make_parser().parse_args()))
