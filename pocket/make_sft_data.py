"""Make the SFT set, 1,000 curated Sudoku traces in s1K's schema: python pocket/make_sft_data.py

s1K was curated from a far larger pool for quality. Here the pool is the mixture that the base model was pretrained on,
on puzzles of the training grids, and curation keeps what is well formed and has at least 0.7 of the empty cells right
(5 of 6): the `careful` answers and the better `scan` ones, so not all of them are right.
"""

from __future__ import annotations

import argparse
import json
import re
from collections.abc import Iterator
from pathlib import Path

import numpy as np
from sudoku_traces import ROOT, as_digits, draw_puzzles, mixed_completion, training_grids

from d1.runs.entry import run_script
from d1.tasks import load_task
from d1.tasks.sudoku import solution_grids

WELL_FORMED = re.compile(r"<reasoning>([^<>]+)</reasoning>\n<answer>([^<>]+)</answer>")
LEAST_CELLS_RIGHT = 0.7


def curated_rows(solutions: np.ndarray, seed: int) -> Iterator[dict[str, str | list[str]]]:
    """Rows with `question`, `thinking_trajectories` and `attempt`, no puzzle twice, without end."""
    task, all_grids, rng = load_task("sudoku"), as_digits(solution_grids()), np.random.default_rng(seed)
    seen: set[str] = set()
    while True:
        for puzzle, solution in zip(*draw_puzzles(solutions, 100, all_grids, rng), strict=True):
            digits = "".join(map(str, puzzle))
            question = f"Solve the following Sudoku puzzle: {digits}\n"
            text = mixed_completion(puzzle, solution, rng)
            match = WELL_FORMED.fullmatch(text)
            row = {"question": question, "ground_truth": "".join(map(str, solution))}
            if match and digits not in seen and task.score(text, row)["cells"] >= LEAST_CELLS_RIGHT:
                seen.add(digits)
                yield {"question": question, "thinking_trajectories": [match[1]], "attempt": match[2]}


def make_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--rows", type=int, default=1000)
    parser.add_argument("--data_file", type=Path, default=ROOT / "dataset" / "sudoku_train.csv")
    parser.add_argument("--output_file", type=Path, default=ROOT / "dataset" / "sudoku_sft.jsonl")
    return parser


def main(args: argparse.Namespace) -> None:
    rows = curated_rows(training_grids(args.data_file), args.seed)
    text = "".join(json.dumps(next(rows)) + "\n" for _ in range(args.rows))
    args.output_file.write_text(text, newline="\n")


if __name__ == "__main__":
    run_script("make_sft_data.py", lambda: main(make_parser().parse_args()))
