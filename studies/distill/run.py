"""Distil pocket models after SFT and RL, and sample with every model and sampler: a line per model in data/*.jsonl.

    OMP_NUM_THREADS=1 python -m studies.distill.run --search    # learning rates, on validation problems
    OMP_NUM_THREADS=1 python -m studies.distill.run             # what is missing of two tasks and three seeds

`--tasks`, `--methods` and `--seeds` share the work between processes. README.md has the protocol; `report.py` makes the
tables.
"""

from __future__ import annotations

import argparse
import logging
import shutil
from collections.abc import Mapping, Sequence
from itertools import product
from pathlib import Path
from typing import Any, NamedTuple

from d1.distill.train import main as distil
from d1.distill.train import make_parser as distil_parser
from d1.models import load_model, load_tokenizer
from d1.ranges import SEED
from d1.runs.cli import OneLineParser, run_script
from d1.tasks import load_task
from pocket.recipes import RECIPES, ROOT
from studies.distill.teachers import OUTPUT, SEEDS, TASKS, teacher
from studies.json_lines import Run, complete, read_lines
from studies.samplers import measure
from studies.samplers.measure import FRESH, measured

DATA = Path(__file__).resolve().parent / "data"
RUNS, GOAL = DATA / "runs.jsonl", DATA / "goal.jsonl"
LENGTH, VALIDATION, TEST = 32, 512, 1000
FRESH_SEEDS = {"test": 1, "goal": 2}  # of the problems that judge; those of seed 0 judged before there were caches
UNDISTILLED = "undistilled"
STEPS = {"dparallel": 128, "t3d": 256, "d-opsd": 60}  # of the optimizer
METHODS = (UNDISTILLED, *STEPS)
# These are data alone: version 0.3 has d-opsd, which saved no passes, and commit 6fbae12b has t3d, which had a lower
# mean than dparallel on both tasks.
ARCHIVED = ("t3d", "d-opsd")
RUNNABLE = tuple(method for method in METHODS if method not in ARCHIVED)
RATES = {"dparallel": (3e-4, 1e-3), "t3d": (1e-4, 3e-4), "d-opsd": (1e-5, 1e-4)}
OWN = {
    "dparallel": ("--block_length", LENGTH),
    "t3d": ("--block_length", LENGTH, "--warmup_steps", 0),
    "d-opsd": ("--block_length", 8),
}
EXACT = "exact"
RULES = (
    *(("threshold", 0.5), ("threshold", 0.7), ("threshold", 0.8), ("threshold", 0.9), ("factor", 2.0)),
    *(("entropy", 0.5), ("entropy", 1.75), ("entropy", 2.5)),
)
CACHED = "delayed, "  # how the name of a sampler with a cache begins
MARGIN = 1.0  # points of accuracy that count as no loss
FEWER = 10.0  # times fewer computed tokens than exact: the goal
Line = Mapping[str, Any]


def parallel(rule: str, level: float, block: int, steps: int = LENGTH) -> dict[str, Any]:
    return {"sampler": "parallel", "reveal": rule, "reveal_level": level, "block": block, "steps": steps}


DELAYED = {"sampler": "cached+parallel", "kv_cache": "delayed"}
SAMPLERS: dict[str, dict[str, Any]] = {
    EXACT: {"block": 8, "steps": LENGTH // 2},
    **{f"{rule} {level:g}, one block": parallel(rule, level, LENGTH) for rule, level in RULES},
    **{f"{CACHED}{rule} {level:g}, one block": parallel(rule, level, LENGTH) | DELAYED for rule, level in RULES},
    **{f"threshold {level:g}, blocks of 8": parallel("threshold", level, 8) for level in (0.7, 0.9)},
    **{f"at most {steps}, one block": parallel("threshold", 0.9, LENGTH, steps) for steps in (1, 2, 3)},
}


def distilled(start: Path, task: str, seed: int, method: str, rate: float, folder: Path) -> Path:
    """The folder of a distilled model."""
    recipe, job = RECIPES[task], f"{method}-{rate:g}"
    flags: list[object] = ["--config", ROOT / "recipes" / "pocket-distill.yaml"]
    flags += ["--method", method, "--model_name", start]
    flags += ["--train_data", recipe.task, "--num_prompts", 512, "--max_prompt_length", recipe.prompt_tokens]
    flags += ["--max_steps", STEPS[method], "--num_epochs", 1000, "--learning_rate", rate, "--seed", seed]
    flags += ["--output_dir", folder, "--job_name", job, "--save_steps", 100_000, "--views_at_once", LENGTH]
    flags += ["--batch_size", 32]
    if (folder / job / "README.md").exists():  # the card, which is written last
        return folder / job
    shutil.rmtree(folder / job, ignore_errors=True)  # of a run that was killed
    distil(distil_parser().parse_args([*map(str, flags), *map(str, OWN[method])]))
    return folder / job


def outcomes(folder: Path, task: str, split: str, names: Sequence[str] = tuple(SAMPLERS)) -> dict[str, dict[str, Any]]:
    """What samplers do with a split's problems."""
    model, tokenizer = load_model(str(folder)).eval(), load_tokenizer(str(folder))
    if split == "validation":
        rows = load_task(RECIPES[task].task).load_rows("validation").select(range(VALIDATION))
    else:
        rows = FRESH[task](TEST, FRESH_SEEDS[split])
    return measured(model, tokenizer, rows, task, LENGTH, {name: SAMPLERS[name] for name in names})


def best_rate(lines: Sequence[Line], rates: Mapping[str, Sequence[float]]) -> dict[str, float]:
    """method -> of its learning rates the one with the highest AUP; only for methods whose `rates` were all tried."""
    best = {}
    for method, tried in rates.items():
        own = {line["rate"]: line["samplers"] for line in lines if line["method"] == method}
        if {*own} == {*tried}:
            highest = max(y for samplers in own.values() for _, y in measure.points(samplers))
            best[method] = max(own, key=lambda rate: measure.aup(own[rate], highest))
    return best


def mean_over(lines: Sequence[Line], split: str, name: str, value: str) -> float:
    """A sampler's accuracy, or its passes, tokens or computed tokens per problem: the mean of the seeds."""
    return measure.mean_over([line[split][name] for line in lines], value)


def chosen(lines: Sequence[Line], least: float, fewest: str = "computed") -> str:
    """The sampler with the fewest computed tokens, or `passes`, among those that solve `least` percent of the
    validation problems in the mean of these lines (the seeds of one model); if there is none, the most accurate one."""
    names = [*lines[0]["validation"]]
    good = [name for name in names if mean_over(lines, "validation", name, "accuracy") >= least]
    if good:
        return min(good, key=lambda name: mean_over(lines, "validation", name, fewest))
    return max(names, key=lambda name: mean_over(lines, "validation", name, "accuracy"))


class Candidate(NamedTuple):
    """What is tried on the goal: a distilled model's sampler, against the best undistilled one."""

    slow: str
    method: str
    name: str


def for_goal(start: Sequence[Line], distilled: Mapping[str, Sequence[Line]], exact: str) -> Candidate | None:
    """The most accurate sampler of all distilled models that takes at most half the passes of the best undistilled one,
    and computes `FEWER` times fewer tokens than `exact`; None if there is none. The best undistilled sampler is the
    one with the fewest passes of those at most `MARGIN` points below `exact`.

    Args:
        start: lines of the undistilled model, one per seed.
        distilled: method -> lines, one per seed.
    """
    slow = chosen(start, mean_over(start, "validation", exact, "accuracy") - MARGIN, "passes")
    most = {"passes": mean_over(start, "validation", slow, "passes") / 2}
    most["computed"] = mean_over(start, "validation", exact, "computed") / FEWER
    found = [
        (mean_over(lines, "validation", name, "accuracy"), Candidate(slow, method, name))
        for method, lines in distilled.items()
        for name in (lines[0]["validation"] if lines else ())
        if all(mean_over(lines, "validation", name, of) <= limit for of, limit in most.items())
    ]
    return max(found)[1] if found else None


def candidate(task: str) -> Candidate | None:
    """What is tried on the goal of a task; None before all of its models are judged."""
    own = [line for line in read_lines(RUNS) if line["task"] == task]
    by_method = {method: [line for line in own if line["method"] == method] for method in METHODS}
    if any(len(lines) < len(SEEDS) for lines in by_method.values()):
        return None
    return for_goal(by_method.pop(UNDISTILLED), by_method, EXACT)


def main(args: argparse.Namespace) -> None:
    output, found = Path(args.output_dir), DATA / "search.jsonl"
    rates = best_rate(read_lines(found), RATES)

    def searched(run: Run) -> dict[str, Any]:
        start = teacher(run["task"], run["seed"], output)
        folder = distilled(start, run["task"], run["seed"], run["method"], run["rate"], start.parent)
        return {"samplers": outcomes(folder, run["task"], "validation")}

    def judged(run: Run) -> dict[str, Any]:
        task, seed = run["task"], run["seed"]
        start = folder = teacher(task, seed, output)
        if run["rate"]:
            folder = distilled(start, task, seed, run["method"], run["rate"], start.parent)
        return {split: outcomes(folder, task, split) for split in ("validation", "test")}

    if args.search:
        grid = [(method, rate) for method in args.methods for rate in RATES.get(method, ())]
        runs = [{"task": TASKS[0], "seed": SEEDS[0], "method": method, "rate": rate} for method, rate in grid]
        return complete(found, runs, output, searched)
    runs = [
        {"task": task, "seed": seed, "method": method, "rate": rates.get(method)}
        for seed, task, method in product(args.seeds, args.tasks, args.methods)
        if method == UNDISTILLED or method in rates
    ]
    complete(RUNS, runs, output, judged)

    def tried(run: Run) -> dict[str, Any]:
        start, one = teacher(run["task"], run["seed"], output), Candidate(run["slow"], run["method"], run["name"])
        folder = distilled(start, run["task"], run["seed"], one.method, rates[one.method], start.parent)
        found = {UNDISTILLED: outcomes(start, run["task"], "goal", [EXACT, one.slow])}
        return found | {"distilled": outcomes(folder, run["task"], "goal", [one.name])}

    for task in args.tasks:
        one = candidate(task)
        if one is not None:
            complete(GOAL, [{"task": task, "seed": seed, **one._asdict()} for seed in SEEDS], output, tried)


def make_parser() -> argparse.ArgumentParser:
    parser = OneLineParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--search", action="store_true", help="the learning rates")
    parser.add_argument("--methods", nargs="+", choices=RUNNABLE, default=list(RUNNABLE))
    parser.add_argument("--tasks", nargs="+", choices=TASKS, default=list(TASKS))
    parser.add_argument("--seeds", nargs="+", type=SEED, default=list(SEEDS))
    parser.add_argument("--output_dir", default=OUTPUT, help="of the models (default: %(default)s)")
    return parser


if __name__ == "__main__":
    logging.basicConfig(level=logging.INFO, format="%(message)s")
    run_script("studies.distill.run", lambda: main(make_parser().parse_args()))
