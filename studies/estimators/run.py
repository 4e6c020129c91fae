"""Measure the effect of each estimator and its number of views on the policy gradient of pocket models.

    python -m studies.estimators.run                  # half an hour on one core; docs/estimators.md and its figure
    python -m studies.estimators.run --tasks sudoku --models runs/demo/seed0/sft_grpo --output_dir runs/mine
    python -m studies.estimators.run --only_report    # the tables of existing results

The models are each task's base and its SFT model. Results are lines of `results.jsonl` in the output folder. If the
study is killed, run the same command to continue.
"""

from __future__ import annotations

import argparse
import os
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from safetensors.torch import load_file, save_file

from d1.models import load_model, load_tokenizer
from d1.runs.entry import OneLineParser, run_script
from d1.runs.record import run_record
from d1.tasks import load_task
from pocket.demo import sft
from pocket.phases import run_phases
from studies.estimators.completions import sample_rows, texts_of
from studies.estimators.measures import CHOICES, Case, Target, long_run, measure
from studies.estimators.report import write_report
from studies.json_lines import append_line, read_lines
from studies.leaderboard.plan import ROOT, TASKS, Setup
from studies.leaderboard.results import DATA, at_the_end, read_results

RESULTS = "results.jsonl"
DOCUMENT = ROOT / "docs" / "estimators.md"


def make_parser() -> argparse.ArgumentParser:
    parser = OneLineParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tasks", nargs="+", default=[*TASKS], choices=[*TASKS])
    parser.add_argument("--models", nargs="+", type=Path, help="folders of one task's models; default: base and SFT")
    parser.add_argument("--groups", type=int, default=16, help="problems, with --group completions each")
    parser.add_argument("--group", type=int, default=8)
    parser.add_argument("--draws", type=int, default=4, help="draws of each estimator's views")
    parser.add_argument("--relative_error", type=float, default=0.01, help="relative error of the any-order bound")
    parser.add_argument("--gradient_draws", type=int, default=8, help="draws of 32 views, for the bound's gradient")
    parser.add_argument("--output_dir", type=Path, default=ROOT / "runs" / "estimators")
    parser.add_argument("--document", type=Path, help="default: docs/estimators.md; with --models in --output_dir")
    parser.add_argument("--board", type=Path, default=DATA, help="folder of the leaderboard's data")
    parser.add_argument("--only_report", action="store_true", help="measure nothing, report existing results")
    return parser


def models_of(args: argparse.Namespace, task: str, console: Console) -> dict[str, Path]:
    """The models by their names in the tables; a missing SFT model is trained."""
    if args.models:
        return {f"{task}: {path.name}": path for path in args.models}
    folder = args.output_dir / task
    run_phases([sft(folder, 0, miniature=False, task=task)], folder, 1, console)
    return {f"{task}: base": ROOT / "pocket" / TASKS[task].base, f"{task}: SFT": folder / "sft"}


def advantages_of(rewards: torch.Tensor, group: int) -> torch.Tensor:
    """(rows,) rewards minus their group's mean, as in d1. If all groups have equal rewards, as with an untrained model,
    every other completion counts as good."""
    centred = rewards.view(-1, group) - rewards.view(-1, group).mean(-1, keepdim=True)
    if not centred.any():
        centred = 0.5 - (torch.arange(group) % 2).float().expand_as(centred)
    return centred.flatten()


def make_case(task: str, path: Path, groups: int, group: int) -> Case:
    """Completions of training problems, sampled as in RL, with their advantages."""
    module, length = load_task(TASKS[task].dataset), TASKS[task].length
    rows = [row for row in module.load_rows("train").select(range(groups)) for _ in range(group)]
    model, tokenizer = load_model(str(path)), load_tokenizer(str(path))
    sampled = sample_rows(model, tokenizer, [row["prompt"] for row in rows], length, seed=0)
    columns = {name: [row[name] for row in rows] for name in ("question", "ground_truth")}
    texts = texts_of(sampled, tokenizer)
    rewards = sum(torch.tensor(reward(texts, **columns)) for reward in module.REWARDS)
    return Case(model, sampled, advantages_of(torch.as_tensor(rewards), group), group, tokenizer.mask_token_id)


def target_of(case: Case, args: argparse.Namespace, file: Path) -> Target:
    """The long run, which is kept in a file because it takes most of the time."""
    if not file.exists():
        found = long_run(case, args.relative_error, gradient_draws=args.gradient_draws)
        tensors = {name: torch.as_tensor(value).contiguous() for name, value in found._asdict().items()}
        file.parent.mkdir(parents=True, exist_ok=True)
        partial = file.with_suffix(".partial")
        save_file(tensors, partial)
        partial.rename(file)
    values: dict[str, Any] = {name: v if v.dim() else v.item() for name, v in load_file(file).items()}
    return Target(**values)


def identity(args: argparse.Namespace, name: str, path: Path) -> dict[str, Any]:
    """The model and the settings that a result belongs to."""
    settings = {key: getattr(args, key) for key in ("groups", "group", "draws")}
    return {"model": name, "path": os.path.relpath(path, ROOT), **settings}


def study(args: argparse.Namespace, task: str, name: str, path: Path, console: Console) -> None:
    """Measures what is missing for one model."""
    of, file = identity(args, name, path), args.output_dir / RESULTS
    done = {(line["name"], line["views"]) for line in read_lines(file) if line["of"] == of}
    missing = [choice for choice in CHOICES if (choice.name, choice.views) not in done]
    if not missing:
        return
    case = make_case(task, path, args.groups, args.group)
    stem = "_".join([name.replace(": ", "_"), str(args.groups), str(args.group), str(args.gradient_draws)])
    target = target_of(case, args, args.output_dir / f"{stem}.safetensors")
    prompts = case.sampled.attention_mask.sum(-1).float().mean().item()
    common = {
        "of": of,
        "tokens_of_rollout": case.steps * (prompts + case.sampled.gen_length),
        "bound": target.bound.mean().item(),
        "trajectory": target.trajectory.mean().item(),
        "bound_error": target.bound_error,
        "gradient_error": target.gradient_error,
        "record": run_record(),
    }
    for choice in missing:
        console.print(f"{name}: {choice.name}, {choice.views} views")
        found = measure(case, choice, target, args.draws)
        append_line(file, {"name": choice.name, "views": choice.views, **found, **common})


def accuracies(board: Path) -> dict[str, dict[str, float]]:
    """Task -> method -> final accuracy on validation problems when training starts from SFT, if there is one."""
    results = read_results(board)
    return {task: at_the_end(results, Setup(task, "sft")) for task in TASKS}


def main(args: argparse.Namespace) -> None:
    if args.groups < 2 or args.group < 2 or args.draws < 2:
        raise ValueError("--groups, --group and --draws must be at least 2: one value has no variance")
    if args.models and len(args.tasks) > 1:
        raise ValueError("--models must be models of one task: name it with --tasks")
    console = Console()
    args.output_dir = args.output_dir.resolve()
    path = args.document or (args.output_dir / "estimators.md" if args.models else DOCUMENT)
    if not args.only_report:
        for task in args.tasks:
            for name, model in models_of(args, task, console).items():
                study(args, task, name, model, console)
    latest = {
        (line["of"]["model"], line["name"], line["views"]): line for line in read_lines(args.output_dir / RESULTS)
    }
    console.print(write_report([*latest.values()], path.resolve(), accuracies(args.board)), markup=False)


if __name__ == "__main__":
    run_script("studies.estimators.run", lambda: main(make_parser().parse_args()))
