"""A causal context next to block-causal attention: SFT, RL by replay and by JustGRPO. PROTOCOL.md has the protocol.

    OMP_NUM_THREADS=1 python -m studies.causal_context.run

A line per run goes to data/. If the command is killed, run it again; several processes share the work.
"""

from __future__ import annotations

import argparse
import logging
import shutil
import time
from collections.abc import Mapping
from itertools import product
from pathlib import Path
from typing import Any

from d1.models import load_model, load_tokenizer
from d1.runs.cli import OneLineParser, run_script
from d1.runs.record import run_record
from d1.sft import train as sft_train
from pocket.demo import BLOCK_BASE, sft
from pocket.recipes import ROOT
from studies.json_lines import complete
from studies.leaderboard.plan import TASKS
from studies.leaderboard.run import commit, logs_of, train_from
from studies.samplers.measure import FRESH, measured

RUNS = Path(__file__).parent / "data" / "runs.jsonl"
BASES = {"block-causal": BLOCK_BASE, "causal-context": "causal_base"}  # attention -> folder in pocket/
LENGTH, BLOCK = TASKS["sudoku"].length, 8
RL: dict[str, list[object]] = {  # arm -> its method, and the steps of a rollout: two tokens per step, or one
    "replay": ["--method", "cj-grpo", "--diffusion_steps", LENGTH // 2],
    "JustGRPO": ["--method", "just-grpo-blocks", "--diffusion_steps", LENGTH],
}
ARMS = ("base", "sft", *RL)
SEEDS = (0, 1, 2)
RATE, BUDGET = 3e-4, 1_500_000  # BUDGET: compute tokens of RL, over rollouts, scoring and updates
PROBLEMS, PROBLEM_SEED = 400, 12
LEVELS = (0.5, 0.7, 0.9)


def samplers(attention: str, arm: str) -> dict[str, dict[str, Any]]:
    """Name -> options of `sample`. All are greedy, in blocks of 8. "left to right" is that of JustGRPO's rollouts."""
    exact = {f"exact {tokens}": {"steps": LENGTH // tokens} for tokens in (1, 2, 4)}
    every = exact | {f"threshold {of}": {"sampler": "parallel", "reveal_level": of, "steps": LENGTH} for of in LEVELS}
    if arm == "JustGRPO":
        masked = {"first_token": "masked"} if attention == "causal-context" else {}
        every["left to right"] = {"remasking": "leftmost", "steps": LENGTH, **masked}
    return every


def settings(run: Mapping[str, Any], budget: int) -> list[str]:
    """The flags of RL that define a run, in addition to pocket.yaml's."""
    flags = [*RL[run["arm"]], "--dataset", "sudoku", *TASKS["sudoku"].flags, "--block_length", BLOCK]
    flags += ["--num_generations", 8, "--seed", run["seed"], "--learning_rate", RATE, "--lr_scheduler_type", "linear"]
    flags += ["--lr_scheduler_kwargs", "{}", "--warmup_steps", 0, "--views_at_once", 64]
    return [*map(str, flags), "--max_compute_tokens", str(budget), "--max_steps", str(budget)]


def line(run: Mapping[str, Any], folder: Path, rows: Any, budget: int = BUDGET) -> dict[str, Any]:
    """Trains a run from its base and judges it on `rows`; a model that did not stay finite has solved nothing."""
    base, own = ROOT / "pocket" / BASES[run["attention"]], folder / "-".join(map(str, run.values()))
    shutil.rmtree(own, ignore_errors=True)  # left by a killed run
    began, model, flags, error = time.process_time(), base, list[str](), None
    if run["arm"] == "sft":
        flags = [*sft(own, run["seed"], miniature=False).command[2:], "--model_name", str(base)]
        sft_train.main(sft_train.make_parser().parse_args(flags))
        model, flags = own / "sft", []
    elif run["arm"] in RL:
        flags = settings(run, budget)
        error = train_from(base, own, flags)
        model = base if error else own
    costs = logs_of(own) | {"processor_seconds": round(time.process_time() - began, 1)}
    options = samplers(run["attention"], run["arm"])
    found = measured(load_model(str(model)).eval(), load_tokenizer(str(model)), rows, "sudoku", LENGTH, options)
    if error:
        found = {name: {**one, "solved": "0" * len(rows)} for name, one in found.items()}
    shutil.rmtree(own, ignore_errors=True)
    return {"settings": flags, "error": error, **costs, "samplers": found, "commit": commit(), **run_record()}


def runs() -> list[dict[str, Any]]:
    """Seed by seed, so that an incomplete study has all arms. A base has no seed but its own."""
    every = [{"attention": of, "arm": arm, "seed": seed} for seed, arm, of in product(SEEDS, ARMS, BASES)]
    return [run for run in every if run["arm"] != "base" or run["seed"] == SEEDS[0]]


def make_parser() -> argparse.ArgumentParser:
    parser = OneLineParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--output_dir", default="runs/causal_context", help="of the models (default: %(default)s)")
    return parser


def main(args: argparse.Namespace) -> None:
    folder = Path(args.output_dir).resolve()
    folder.mkdir(parents=True, exist_ok=True)
    rows = FRESH["sudoku"](PROBLEMS, PROBLEM_SEED)
    complete(RUNS, runs(), folder, lambda run: line(run, folder, rows))


if __name__ == "__main__":
    logging.basicConfig(level=logging.INFO, format="%(message)s")
    run_script("studies.causal_context.run", lambda: main(make_parser().parse_args()))
