"""What editing gives a pocket model: accuracy against tokens per pass, with editing and without.

    OMP_NUM_THREADS=1 python -m studies.editing.run

For each task and seed, SFT with masks alone and with visible noise, on the same rows for as many steps; then greedy
completions of problems that no training saw, under each sampler of `SAMPLERS`. Sudoku is done by the block-causal base,
over its exact cache; arithmetic by the base with full attention. A line per trained model goes to data/runs.jsonl, and
one that is there is not made again. `python -m studies.editing.report` makes the tables of README.md.
"""

from __future__ import annotations

import argparse
from itertools import product
from pathlib import Path
from typing import Any

from d1.models import load_model, load_tokenizer
from d1.ranges import COUNT, SEED
from d1.runs.entry import OneLineParser, run_script
from d1.sft import SFTConfig
from d1.sft.train import main as sft
from d1.tasks import load_task
from pocket.recipes import RECIPES, ROOT
from studies.json_lines import append_line, read_lines
from studies.samplers.cost import prompts_of, sample, solved
from studies.samplers.fresh import FRESH

DATA = Path(__file__).parent / "data" / "runs.jsonl"
BASES = {"sudoku": "block_base", "arithmetic": "arithmetic_base"}  # in pocket/
BLOCKS = {"sudoku": 8, "arithmetic": 32}  # the model's own; the whole canvas
NOISES: dict[str, dict[str, Any]] = {
    "masks": {},
    "draft": {"edit_noise": "draft"},
    "uniform": {"edit_noise": "uniform"},
}
LENGTH = 32
LEVELS = (0.3, 0.5, 0.7, 0.9)  # of the rule threshold, with and without edits
BUDGETS = (0, 16)  # max_post_steps: edits only beside masks, and LLaDA2.1's
SAMPLERS: dict[str, dict[str, Any]] = {f"{level}": {"reveal_level": level} for level in LEVELS} | {
    f"{level}, edits, {budget}": {"reveal_level": level, "edit_threshold": 0.5, "max_post_steps": budget}
    for level, budget in product(LEVELS, BUDGETS)
}


def trained(task: str, seed: int, noise: str, args: argparse.Namespace) -> Path:
    """The folder of a model after SFT on a task's rows."""
    job = f"{task}-{noise}-{seed}"
    folder = Path(args.output_dir) / job
    if (folder / "model.safetensors").exists():
        return folder
    config = SFTConfig(
        model_name=str(ROOT / "pocket" / BASES[task]),
        full_finetuning=True,
        train_data=str(ROOT / "dataset" / RECIPES[task].sft_file),
        output_dir=args.output_dir,
        job_name=job,
        batch_size=32,
        grad_accum_steps=1,
        num_epochs=args.epochs,
        learning_rate=5e-4,
        eos_padding=40,
        test_split=0.0,
        eval_steps=10**6,
        seed=seed,
        num_proc=1,
        debugging=True,
        **NOISES[noise],
    )
    sft(config)
    return folder


def measured(folder: Path, task: str, problems: int, samplers: dict[str, dict[str, Any]]) -> dict[str, dict[str, Any]]:
    """For each sampler: whether each problem was solved, as a text of 0 and 1, and what the completions took.

    `drafts` is the same of the text in which each place holds what was written there first: what edits correct or
    spoil is the difference of the two.
    """
    model, tokenizer = load_model(str(folder)).eval(), load_tokenizer(str(folder))
    rows = FRESH[task](problems, 0)
    prompts = prompts_of(rows, tokenizer, model.device)
    found = {}
    for name, options in samplers.items():
        parts = sample(
            model, tokenizer, prompts, LENGTH, 128, block=BLOCKS[task], steps=LENGTH, sampler="parallel", **options
        )
        width, end = prompts.shape[1], tokenizer.eos_token_id
        tokens = [int((row[width:] != end).sum()) + 1 for part in parts for row in part.ids]
        found[name] = {
            "solved": as_text(solved(parts, tokenizer, width, rows, task)),
            "passes": sum(int(part.passes.sum()) for part in parts) / problems,
            "tokens": sum(min(count, LENGTH) for count in tokens) / problems,
            "fed": sum(int(part.forward_tokens.sum()) for part in parts) / problems,
        }
        if parts[0].writes is not None:
            found[name] |= {"edits": sum(int(part.edits.sum()) for part in parts) / problems}
            firsts = [ids for part in parts for ids in first_written(part, end)]
            texts = [str(tokenizer.decode(ids)).split(tokenizer.eos_token)[0] for ids in firsts]
            score = load_task(RECIPES[task].task).score
            found[name]["drafts"] = as_text(
                [score(text, row)["accuracy"] for text, row in zip(texts, rows, strict=True)]
            )
    return found


def first_written(part: Any, end: int) -> list[list[int]]:
    """The first token that was written at each place of a rollout's completions; `end` where none was."""
    firsts = part.writes.ids[..., 0].masked_fill(part.writes.steps[..., 0] < 0, end)
    found: list[list[int]] = firsts.tolist()
    return found


def as_text(values: list[float]) -> str:
    return "".join(str(int(value)) for value in values)


def make_parser() -> argparse.ArgumentParser:
    parser = OneLineParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--problems", type=COUNT, default=500, help="per task (default: %(default)s)")
    parser.add_argument("--epochs", type=COUNT, default=4, help="of SFT, over 1000 rows (default: %(default)s)")
    parser.add_argument("--tasks", nargs="+", choices=BASES, default=list(BASES))
    parser.add_argument("--seeds", nargs="+", type=SEED, default=[0, 1, 2])
    parser.add_argument("--noises", nargs="+", choices=NOISES, default=["masks", "draft"])
    parser.add_argument("--output_dir", default="runs/editing", help="of the trained models (default: %(default)s)")
    return parser


def main(args: argparse.Namespace) -> None:
    there = {(line["task"], line["seed"], line["noise"]) for line in read_lines(DATA)}
    for seed, task, noise in product(args.seeds, args.tasks, args.noises):
        if (task, seed, noise) in there:
            continue
        samplers = {name: of for name, of in SAMPLERS.items() if noise != "masks" or "edit_threshold" not in of}
        found = measured(trained(task, seed, noise, args), task, args.problems, samplers)
        append_line(DATA, {"task": task, "seed": seed, "noise": noise, "epochs": args.epochs, "samplers": found})


if __name__ == "__main__":
    run_script("studies.editing.run", lambda: main(make_parser().parse_args()))
