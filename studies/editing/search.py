"""Choose the noise and the editing threshold of `run.py`, on validation problems and a seed that it does not use.

    OMP_NUM_THREADS=1 python -m studies.editing.search

Each candidate and task adds a line to data/search.jsonl; those that have a line are skipped. Prints the choice as flags
of `run.py`. The protocol is in README.md; `make studies` writes the table.
"""

from __future__ import annotations

import argparse
import statistics
import sys
from itertools import product
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from d1.ranges import COUNT
from d1.runs.cli import OneLineParser, run_script
from d1.tasks import load_task
from pocket.recipes import RECIPES
from studies.editing.run import BASES, measured, trained
from studies.json_lines import append_line, read_lines
from studies.samplers.measure import outcomes

DATA = Path(__file__).parent / "data" / "search.jsonl"
SEED = 10

Runs = dict[int, dict[str, Any]]  # seed -> what one sampler did with one model


class Candidate(NamedTuple):
    """Fields of SFTConfig, and epochs of SFT."""

    noise: dict[str, Any]
    epochs: int


def candidate(kind: str, share: float, weight: float = 1.0, epochs: int = 1) -> Candidate:
    return Candidate({"edit_noise": kind, "edit_share": share, "edit_weight": weight}, epochs)


CANDIDATES = {
    "masks": Candidate({}, 1),
    "draft 0.5": candidate("draft", 0.5),
    "draft 1": candidate("draft", 1.0),
    "uniform 0.1": candidate("uniform", 0.1),
    "draft 0.1": candidate("draft", 0.1),
    "uniform 0.5": candidate("uniform", 0.5),
    "draft 0.5, weight 3": candidate("draft", 0.5, 3.0),
    "masks, 8 epochs": Candidate({}, 8),
    "draft 1, 8 epochs": candidate("draft", 1.0, epochs=8),
    "draft 0.3, 8 epochs": candidate("draft", 0.3, epochs=8),
}
MASKS = {one.epochs: name for name, one in CANDIDATES.items() if not one.noise}
PLAIN: dict[str, dict[str, Any]] = {f"{level}": {"reveal_level": level} for level in (0.3, 0.5, 0.7, 0.9)}
THRESHOLDS = (0.5, 0.8)
EDITING: dict[str, dict[str, Any]] = {
    f"{level}, above {threshold}, {budget}": {
        "reveal_level": level,
        "edit_threshold": threshold,
        "max_post_steps": budget,
    }
    for level, threshold, budget in product((0.3, 0.5, 0.7), THRESHOLDS, (0, 1))
}


def passes(runs: Runs) -> float:
    return statistics.fmean(run["passes"] for run in runs.values())


def gains(runs: Runs, unedited: list[Runs]) -> np.ndarray:
    """(seeds, problems) outcomes of `runs` minus those of the best unedited setting of any model that takes no more
    passes; empty if there is none. Only seeds that both have count."""
    cheaper = [other for other in unedited if passes(other) <= passes(runs) and runs.keys() & other.keys()]
    if not cheaper:
        return np.zeros((0, 0))
    best = max(cheaper, key=lambda other: outcomes(other.values()).mean())
    seeds = [seed for seed in runs if seed in best]
    return outcomes(runs[seed] for seed in seeds) - outcomes(best[seed] for seed in seeds)


def points(lines: list[dict[str, Any]], name: str, threshold: float, task: str) -> list[float]:
    """Points above the unedited frontier, per setting of a candidate that edits above `threshold`; empty without its
    line or that of masks alone after as many epochs."""
    masks = MASKS[CANDIDATES[name].epochs]
    found = {line["noise"]: line["samplers"] for line in lines if line["task"] == task}
    if name == masks or not {name, masks} <= found.keys():
        return []
    unedited = [{SEED: found[model][level]} for model in (masks, name) for level in PLAIN]
    edited = [setting for setting, options in EDITING.items() if options["edit_threshold"] == threshold]
    return [100 * float(gains({SEED: found[name][setting]}, unedited).mean()) for setting in edited]


def chosen(lines: list[dict[str, Any]]) -> tuple[str, float]:
    """The candidate with the highest mean of `points`, of those that were tried on all tasks, and the better of its
    thresholds."""
    scores: dict[str, dict[float, float]] = {}
    for name, threshold in product(CANDIDATES, THRESHOLDS):
        found = [points(lines, name, threshold, task) for task in BASES]
        if all(found):
            scores.setdefault(name, {})[threshold] = statistics.fmean(x for of in found for x in of)
    best = max(scores, key=lambda name: sum(scores[name].values()))
    return best, max(THRESHOLDS, key=scores[best].__getitem__)


def make_parser() -> argparse.ArgumentParser:
    parser = OneLineParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--problems", type=COUNT, default=256, help="per task (default: %(default)s)")
    parser.add_argument("--output_dir", default="runs/editing", help="of the trained models (default: %(default)s)")
    return parser


def main(args: argparse.Namespace) -> None:
    there = {(line["task"], line["noise"]) for line in read_lines(DATA)}
    for (name, (noise, epochs)), task in product(CANDIDATES.items(), BASES):
        if (task, name) in there:
            continue
        rows = load_task(RECIPES[task].task).load_rows("validation")
        rows = rows.select(range(min(args.problems, len(rows))))
        model = trained(task, SEED, noise, epochs, Path(args.output_dir))
        found = measured(model, task, rows, PLAIN | (EDITING if noise else {}))
        append_line(DATA, {"task": task, "seed": SEED, "noise": name, "epochs": epochs, "samplers": found})
    name, threshold = chosen(read_lines(DATA))
    noise, epochs = CANDIDATES[name]
    flags = {name: value for name, value in noise.items() if name != "edit_noise"}
    flags |= {"epochs": epochs, "edit_threshold": threshold}
    sys.stdout.write(" ".join(f"--{name} {value}" for name, value in flags.items()))
    sys.stdout.write("\n")


if __name__ == "__main__":
    run_script("studies.editing.search", lambda: main(make_parser().parse_args()))
