"""Complete problems with many settings of every sampler: a line per model and split in data/frontier.jsonl.

    OMP_NUM_THREADS=1 python -m studies.samplers.frontier

First every setting on validation problems; then, for a task of which all seeds are there, those at the frontier on
fresh problems. README.md has the protocol. The models are those of studies/distill/teachers.py. If the command is
killed, run it again; several processes share the work.
"""

from __future__ import annotations

import argparse
import logging
from collections.abc import Iterable, Mapping, Sequence
from itertools import product
from pathlib import Path
from typing import Any

from benchmarks.machine import describe
from d1.models import load_model, load_tokenizer
from d1.runs.cli import OneLineParser, run_script
from d1.sampling.caches import CACHES
from d1.tasks import load_task
from pocket.recipes import RECIPES
from studies.distill.teachers import OUTPUT, SEEDS, TASKS, teacher
from studies.json_lines import complete, read_lines
from studies.samplers import measure
from studies.samplers.measure import FRESH, measured

DATA = Path(__file__).parent / "data" / "frontier.jsonl"
LENGTH, VALIDATION, TEST = 32, 512, 1000
EXACT, ONE_BLOCK = "exact, blocks of 8", "exact, one block"
REFERENCES: dict[str, dict[str, Any]] = {EXACT: {"block": 8}, ONE_BLOCK: {"block": LENGTH}}
LEVELS = {
    "threshold": (0.5, 0.7, 0.8, 0.9),
    "factor": (1.5, 2.0, 2.5, 3.0),
    "entropy": (1.0, 1.75, 2.5, 3.0),
}
STEPS = {8: (8,), 16: (2, 16), 32: (2, 3, 4, 32)}  # block length -> largest numbers of steps in a block
MARGIN, NEAR = 1.0, 10.0  # points below exact: that count as no loss, and down to which settings are judged
Line = Mapping[str, Any]


def settings() -> dict[str, dict[str, Any]]:
    """Name -> options of `studies.samplers.measure.sample`."""
    found = dict(REFERENCES)
    for cache, (block, caps), (rule, levels) in product((None, *CACHES), STEPS.items(), LEVELS.items()):
        sampler = {"sampler": "parallel"} if cache is None else {"sampler": "cached+parallel", "kv_cache": cache}
        for cap, level in product(caps, levels):
            name = f"{cache or 'no cache'}, {rule} {level:g}, blocks of {block}"
            name += f", at most {cap} steps" if cap < block else ""
            own = {"block": block, "steps": cap * LENGTH // block, "reveal": rule, "reveal_level": level}
            found[name] = sampler | own
    return found


def family(name: str) -> str:
    """The cache of a setting, "no cache", or "exact"."""
    return name.split(", ")[0]


def mean_over(lines: Sequence[Line], name: str, value: str) -> float:
    """A setting's accuracy, or one of its counts per problem: the mean of the lines, which are the seeds of a task."""
    return measure.mean_over([line["samplers"][name] for line in lines], value)


def frontier(lines: Sequence[Line], names: Iterable[str], of: str) -> list[str]:
    """The settings for which no other has at least the same accuracy with as few passes, or computed tokens (`of`)."""
    cost = {name: (mean_over(lines, name, of), -mean_over(lines, name, "accuracy")) for name in names}
    best: list[str] = []
    for name in sorted(cost, key=cost.__getitem__):
        if not best or cost[name][1] < cost[best[-1]][1]:
            best.append(name)
    return best


def chosen(lines: Sequence[Line], reference: str, cache: str | None = None) -> str | None:
    """The setting, with this cache or any, that computes the fewest tokens, of those at most `MARGIN` points below the
    reference; None if there is none."""
    least = mean_over(lines, reference, "accuracy") - MARGIN
    good = [name for name in lines[0]["samplers"] if mean_over(lines, name, "accuracy") >= least]
    good = [name for name in good if name not in REFERENCES and cache in (None, family(name))]
    return min(good, key=lambda name: mean_over(lines, name, "computed"), default=None)


def judged(lines: Sequence[Line]) -> list[str]:
    """The settings that are tried on fresh problems: the references, and every family's two frontiers (passes, tokens)
    down to `NEAR` points below exact."""
    least, names = mean_over(lines, EXACT, "accuracy") - NEAR, [*lines[0]["samplers"]]
    found = {*REFERENCES}
    for cache, of in product(("no cache", *CACHES), ("passes", "computed")):
        own = frontier(lines, [name for name in names if family(name) == cache], of)
        found |= {name for name in own if mean_over(lines, name, "accuracy") >= least}
    return [name for name in names if name in found]


def lines_of(task: str, split: str) -> list[dict[str, Any]]:
    """The lines of a task, by seed."""
    found = [line for line in read_lines(DATA) if (line["task"], line["split"]) == (task, split)]
    return sorted(found, key=lambda line: line["seed"])


def line(run: Mapping[str, Any], output: Path) -> dict[str, Any]:
    folder = teacher(run["task"], run["seed"], output)
    model, tokenizer = load_model(str(folder)).eval(), load_tokenizer(str(folder))
    if run["split"] == "test":
        rows, own = FRESH[run["task"]](TEST, 0), judged(lines_of(run["task"], "validation"))
    else:
        rows, own = load_task(RECIPES[run["task"]].task).load_rows("validation"), [*settings()]
        rows = rows.select(range(VALIDATION))
    options = {name: of for name, of in settings().items() if name in own}
    found = measured(model, tokenizer, rows, run["task"], LENGTH, options)
    return {"length": LENGTH, "machine": describe(), "samplers": found}


def make_parser() -> argparse.ArgumentParser:
    parser = OneLineParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--output_dir", default=OUTPUT, help="of the models (default: %(default)s)")
    return parser


def main(args: argparse.Namespace) -> None:
    output = Path(args.output_dir)
    for split in ("validation", "test"):
        tasks = [task for task in TASKS if split == "validation" or len(lines_of(task, "validation")) == len(SEEDS)]
        runs = [{"task": task, "seed": seed, "split": split} for seed, task in product(SEEDS, tasks)]
        complete(DATA, runs, output, lambda run: line(run, output))


if __name__ == "__main__":
    logging.basicConfig(level=logging.INFO, format="%(message)s")
    run_script("studies.samplers.frontier", lambda: main(make_parser().parse_args()))
