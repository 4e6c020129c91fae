"""Measure the effect of each estimator and its number of views on the policy gradient of pocket models.

    OMP_NUM_THREADS=1 python -m studies.estimators.run    # what is missing; then `make studies` writes the pages

The models are each task's base and its SFT models, one per seed. Each task, model, seed and estimator appends a line to
data/runs.jsonl; a killed run continues with the same command. Several processes may share the work; give each its own
`--tasks` or `--seeds`, because a process that measures a model computes its targets first.
"""

from __future__ import annotations

import argparse
import logging
from collections.abc import Sequence
from functools import lru_cache
from itertools import product
from pathlib import Path
from typing import Any

import torch

from d1.models import load_model, load_tokenizer
from d1.ranges import SEED
from d1.runs.cli import OneLineParser, run_script
from d1.runs.record import run_record
from d1.tasks import load_task
from studies.estimators.choices import BY_KEY, CHOICES, Choice
from studies.estimators.completions import sample_rows, texts_of
from studies.estimators.measures import Case, Target, measure, target_of
from studies.json_lines import Run, complete
from studies.leaderboard.plan import TASKS, Setup
from studies.leaderboard.run import make_start

DATA = Path(__file__).parent / "data" / "runs.jsonl"
MODELS, SEEDS = ("base", "sft"), (1, 2, 3)
SETTINGS = {"groups": 16, "group": 8, "bound_draws": 6}


def runs(tasks: Sequence[str] = (*TASKS,), seeds: Sequence[int] = SEEDS) -> list[Run]:
    """All lines of the study, in the order in which they are measured."""
    cells = product(seeds, tasks, MODELS, CHOICES)
    return [
        {"task": task, "model": model, "seed": seed, "estimator": choice.name, "views": choice.views}
        for seed, task, model, choice in cells
    ]


def draws_of(choice: Choice) -> int:
    """2 to 4 draws, so that most estimators have at most 32 views in total."""
    return min(4, max(2, 32 // choice.views)) if choice.random else 1


def advantages_of(rewards: torch.Tensor, group: int) -> torch.Tensor:
    """(rows,) rewards minus their group's mean, as in d1.

    Raises:
        ValueError: in every group all rewards are equal, so no completion has a weight.
    """
    grouped = rewards.view(-1, group)
    if bool((grouped == grouped[:, :1]).all()):
        raise ValueError(f"all {group} completions of each problem have the same reward: there is no gradient")
    centred = grouped - grouped.mean(-1, keepdim=True)
    return torch.where(grouped.eq(grouped[:, :1]).all(-1, keepdim=True), 0.0, centred).flatten()


def make_case(task: str, path: Path, groups: int, group: int, seed: int = 0) -> Case:
    """Completions of the first training problems, sampled as in RL, with their advantages."""
    module, length = load_task(TASKS[task].dataset), TASKS[task].length
    rows = [row for row in module.load_rows("train").select(range(groups)) for _ in range(group)]
    model, tokenizer = load_model(str(path)), load_tokenizer(str(path))
    sampled, tokens = sample_rows(model, tokenizer, [row["prompt"] for row in rows], length, seed, eos_stop=True)
    columns = {name: [row[name] for row in rows] for name in ("question", "ground_truth")}
    texts = texts_of(sampled, tokenizer)
    rewards = torch.as_tensor(sum(torch.tensor(reward(texts, **columns)) for reward in module.REWARDS))
    return Case(model, sampled, advantages_of(rewards, group), group, tokenizer.mask_token_id, tokens, seed)


@lru_cache(maxsize=1)
def measured_case(task: str, model: str, seed: int, folder: Path) -> tuple[Case, Target, dict[str, Any]]:
    """A model's completions, the targets of estimators on them, and what the lines of this model have in common."""
    case = make_case(task, make_start(folder, Setup(task, model), seed), SETTINGS["groups"], SETTINGS["group"], seed)
    target, counted = target_of(case, SETTINGS["bound_draws"]), case.advantages != 0
    found = {name: getattr(target, name)[counted].mean().item() for name in ("bound", "trajectory")}
    found |= {"bound_error": target.bound_error, "weighted": counted.double().mean().item()}
    return case, target, found


def line_of(run: Run, folder: Path) -> dict[str, Any]:
    """What is measured of a run."""
    case, target, common = measured_case(run["task"], run["model"], run["seed"], folder)
    choice = BY_KEY[run["estimator"], run["views"]]
    found = rounded(measure(case, choice, target, draws_of(choice)) | common)
    return {**found, "settings": {**SETTINGS, "estimator": choice.estimator, **choice.settings}, **run_record()}


def rounded(value: Any) -> Any:
    """Numbers with five digits: enough for a table, and small files."""
    if isinstance(value, dict):
        return {name: rounded(one) for name, one in value.items()}
    if isinstance(value, list):
        return [rounded(one) for one in value]
    return float(f"{value:.5g}") if isinstance(value, float) else value


def make_parser() -> argparse.ArgumentParser:
    parser = OneLineParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tasks", nargs="+", default=[*TASKS], choices=[*TASKS])
    parser.add_argument("--seeds", nargs="+", type=SEED, default=[*SEEDS])
    parser.add_argument("--output_dir", type=Path, default=Path("runs/estimators"), help="of the SFT models")
    return parser


def main(args: argparse.Namespace) -> None:
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(message)s")
    folder = args.output_dir.resolve()
    complete(DATA, runs(args.tasks, args.seeds), folder, lambda run: line_of(run, folder))


if __name__ == "__main__":
    run_script("studies.estimators.run", lambda: main(make_parser().parse_args()))
