"""What editing gives a pocket model: accuracy against tokens per pass, with editing and without.

    OMP_NUM_THREADS=1 python -m studies.editing.run ...

"..." are the flags that `search.py` prints. For each task and seed, SFT with masks alone and with each kind of visible
noise, on the same rows for as many steps; then greedy completions of problems that no training saw, under each sampler
of `samplers`. Sudoku is done by a block-causal model, over its exact cache; arithmetic by one with full attention. Each
trained model adds a line to data/runs.jsonl; models that have a line are skipped. `python -m studies.editing.report`
makes the tables of README.md.
"""

from __future__ import annotations

import argparse
import json
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np

from d1.models import load_model, load_tokenizer
from d1.ranges import BELOW_ONE, COUNT, POSITIVE, SEED, SHARE
from d1.runs.cli import OneLineParser, run_script
from d1.sft import SFTConfig
from d1.sft.train import main as sft
from d1.tasks import load_task
from pocket.recipes import RECIPES, ROOT
from studies.json_lines import append_line, read_lines
from studies.samplers.measure import FRESH, prompts_of, sample, solved

DATA = Path(__file__).parent / "data" / "runs.jsonl"
BASES = {"sudoku": "block_base", "arithmetic": "arithmetic_base"}  # in pocket/
BLOCKS = {"sudoku": 16, "arithmetic": None}  # tokens; None: full attention, the whole canvas is one block
LENGTH = 32
ROWS, ROWS_SEED = 4000, 7
NOISES: dict[str, dict[str, Any]] = {
    "masks": {},
    "draft": {"edit_noise": "draft"},
    "uniform": {"edit_noise": "uniform"},
    "draft, 2 turns": {"edit_noise": "draft", "edit_turns": 2},
}
LEVELS = (0.3, 0.5, 0.7, 0.9)  # of the rule threshold, with edits
FRONTIER = (0.3, 0.5, 0.6, 0.7, 0.8, 0.9, 0.95)  # without; a coarse frontier would flatter edits
BUDGETS = (0, 1)  # max_post_steps: edits only while the block has masks; and also one pass over each full block
PRESETS = ("quality", "speed")  # LLaDA2.1's


def samplers(threshold: float) -> dict[str, dict[str, Any]]:
    """Name -> options of `sample`; edits have a probability above `threshold`."""
    plain = {f"{level}": {"reveal_level": level} for level in FRONTIER}
    editing = {
        f"{level}, edits, {budget}": {"reveal_level": level, "edit_threshold": threshold, "max_post_steps": budget}
        for level, budget in product(LEVELS, BUDGETS)
    }
    return plain | editing | {name: {"editing": name} for name in PRESETS}


def edits(options: dict[str, Any]) -> bool:
    return "edit_threshold" in options or "editing" in options


def block_model(task: str, folder: Path) -> Path:
    """The task's base with its `BLOCKS`, written to `folder`."""
    path = folder / f"{task}-base"
    if not path.exists():
        base = str(ROOT / "pocket" / BASES[task])
        model: Any = load_model(base)
        model.config.block_size = BLOCKS[task]
        model.save_pretrained(path)
        load_tokenizer(base).save_pretrained(path)
    return path


def right_rows(task: str, folder: Path) -> Path:
    """The file of training problems with right answers only."""
    path, recipe = folder / f"{task}-{ROWS}.jsonl", RECIPES[task]
    if not path.exists():
        draw = recipe.traces.problems(ROOT / "dataset" / recipe.training_file)
        lines = []
        for problem in draw(ROWS, np.random.default_rng(ROWS_SEED)):
            trajectory, attempt = recipe.traces.trace("careful", *problem)
            row = {"question": recipe.traces.question(*problem), "thinking_trajectories": [trajectory]}
            lines.append(json.dumps(row | {"attempt": attempt}) + "\n")
        folder.mkdir(parents=True, exist_ok=True)
        path.write_text("".join(lines))
    return path


def trained(task: str, seed: int, noise: dict[str, Any], epochs: int, folder: Path) -> Path:
    """The folder of a model after SFT."""
    job = "-".join([task, str(seed), *(f"{name}_{value}" for name, value in noise.items()), f"{epochs}_epochs"])
    if (folder / job / "model.safetensors").exists():
        return folder / job
    config = SFTConfig(
        model_name=str(block_model(task, folder)),
        full_finetuning=True,
        train_data=str(right_rows(task, folder)),
        output_dir=str(folder),
        job_name=job,
        batch_size=32,
        grad_accum_steps=1,
        num_epochs=epochs,
        learning_rate=5e-4,
        eos_padding=40,
        test_split=0.0,
        eval_steps=10**6,
        seed=seed,
        num_proc=1,
        debugging=True,
        **noise,
    )
    sft(config)
    return folder / job


def measured(folder: Path, task: str, rows: Any, samplers: dict[str, dict[str, Any]]) -> dict[str, dict[str, Any]]:
    """For each sampler: whether each problem was solved, as a text of 0 and 1, and what the completions took.

    `drafts` is the same of the text in which each place holds what was written there first: what edits correct or
    spoil is the difference of the two.
    """
    model, tokenizer = load_model(str(folder)).eval(), load_tokenizer(str(folder))
    prompts = prompts_of(rows, tokenizer, model.device)
    width, end, score = prompts.shape[1], tokenizer.eos_token_id, load_task(RECIPES[task].task).score
    found = {}
    for name, options in samplers.items():
        settings = {"block": BLOCKS[task] or LENGTH, "steps": LENGTH, "sampler": "parallel", **options}
        parts = sample(model, tokenizer, prompts, LENGTH, **settings)
        tokens = [int((row[width:] != end).sum()) + 1 for part in parts for row in part.ids]
        found[name] = {
            "solved": as_text(solved(parts, tokenizer, width, rows, task)),
            "passes": sum(int(part.passes.sum()) for part in parts) / len(rows),
            "tokens": sum(min(count, LENGTH) for count in tokens) / len(rows),
            "fed": sum(int(part.forward_tokens.sum()) for part in parts) / len(rows),
        }
        if edits(options):
            found[name] |= {"edits": sum(int(part.edits.sum()) for part in parts) / len(rows)}
            firsts = [str(tokenizer.decode(ids)) for part in parts for ids in part.first_ids[:, width:].tolist()]
            texts = [text.split(tokenizer.eos_token)[0] for text in firsts]
            outcomes = [score(text, row)["accuracy"] for text, row in zip(texts, rows, strict=True)]
            found[name]["drafts"] = as_text(outcomes)
    return found


def as_text(values: list[float]) -> str:
    return "".join(str(int(value)) for value in values)


def make_parser() -> argparse.ArgumentParser:
    parser = OneLineParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--problems", type=COUNT, default=500, help="per task (default: %(default)s)")
    parser.add_argument("--epochs", type=COUNT, default=1, help="of SFT (default: %(default)s)")
    parser.add_argument("--tasks", nargs="+", choices=BASES, default=list(BASES))
    parser.add_argument("--seeds", nargs="+", type=SEED, default=[0, 1, 2])
    parser.add_argument("--noises", nargs="+", choices=NOISES, default=list(NOISES))
    parser.add_argument("--edit_share", type=SHARE, default=1.0, help="of the noise (default: %(default)s)")
    parser.add_argument("--edit_weight", type=POSITIVE, default=1.0, help="of the noise (default: %(default)s)")
    parser.add_argument("--edit_threshold", type=BELOW_ONE, default=0.5, help="of the samplers (default: %(default)s)")
    parser.add_argument("--output_dir", default="runs/editing", help="of the trained models (default: %(default)s)")
    return parser


def main(args: argparse.Namespace) -> None:
    there = {(line["task"], line["seed"], line["noise"], line["epochs"]) for line in read_lines(DATA)}
    chosen = {name: getattr(args, name) for name in ("edit_share", "edit_weight")}
    for seed, task, name in product(args.seeds, args.tasks, args.noises):
        if (task, seed, name, args.epochs) in there:
            continue
        noise = NOISES[name] | (chosen if NOISES[name] else {})
        options = {key: of for key, of in samplers(args.edit_threshold).items() if noise or not edits(of)}
        model = trained(task, seed, noise, args.epochs, Path(args.output_dir))
        found = measured(model, task, FRESH[task](args.problems, 0), options)
        line = {"task": task, "seed": seed, "noise": name, "epochs": args.epochs, "threshold": args.edit_threshold}
        append_line(DATA, line | {"settings": noise, "samplers": found})


if __name__ == "__main__":
    run_script("studies.editing.run", lambda: main(make_parser().parse_args()))
