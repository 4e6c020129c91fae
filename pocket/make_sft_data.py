"""Make the SFT set of a task, 1,000 curated traces in s1K's schema: python -m pocket.make_sft_data --task sudoku

s1K was selected for quality from a far larger pool. Here the pool is the mixture of answers that the base model was
pretrained on, for training problems. Well-formed answers that are at least nearly right are kept: 5 of 6 empty cells of
a Sudoku, an expression at most 1 away from a Countdown's target, two of three steps in arithmetic, all letters of a
program. These are the `careful` answers and the better ones of the other styles, so not all of them are right.
"""

from __future__ import annotations

import argparse
import json
import re
from collections.abc import Iterator
from pathlib import Path

import numpy as np

from d1.runs.cli import run_script
from pocket.answers import Draw
from pocket.recipes import RECIPES, ROOT, Recipe

WELL_FORMED = re.compile(r"<reasoning>([^<>]+)</reasoning>\n<answer>([^<>]+)</answer>")


def curated_rows(recipe: Recipe, draw: Draw, seed: int) -> Iterator[dict[str, str | list[str]]]:
    """An endless stream of rows with `question`, `thinking_trajectories` and `attempt`; no question comes twice."""
    rng = np.random.default_rng(seed)
    seen: set[str] = set()
    while True:
        for problem in draw(100, rng):
            question = recipe.traces.question(*problem)
            text = recipe.write(1, problem, rng)
            match = WELL_FORMED.fullmatch(text)
            if match and question not in seen and recipe.traces.quality(text, *problem) >= recipe.least_quality:
                seen.add(question)
                yield {"question": question, "thinking_trajectories": [match[1]], "attempt": match[2]}


def make_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--task", choices=[*RECIPES], default="sudoku")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--output_file", type=Path, help="default: the task's file in dataset/")
    return parser


def main(args: argparse.Namespace) -> None:
    recipe = RECIPES[args.task]
    rows = curated_rows(recipe, recipe.traces.problems(ROOT / "dataset" / recipe.training_file), args.seed)
    text = "".join(json.dumps(next(rows)) + "\n" for _ in range(1000))
    (args.output_file or ROOT / "dataset" / recipe.sft_file).write_text(text, newline="\n")


if __name__ == "__main__":
    run_script("make_sft_data.py", lambda: main(make_parser().parse_args()))
