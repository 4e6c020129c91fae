"""Why training on fast rollouts collapses: PROTOCOL.md says what is run; a line per run in data/STAGE.jsonl.

    OMP_NUM_THREADS=1 python -m studies.collapse.run untrained    # gradients before training, per sampler and estimator
    OMP_NUM_THREADS=1 python -m studies.collapse.run logs         # `prefix` again, with the probability of its rollouts
    OMP_NUM_THREADS=1 python -m studies.collapse.run test         # the registered test, at equal rollouts
    OMP_NUM_THREADS=1 python -m studies.collapse.run reference tokens rates seconds    # at equal tokens, and seconds
    OMP_NUM_THREADS=1 python -m studies.collapse.run test --quick     # one short run of each arm, in another folder

If a command is killed, run it again; several processes share the work of a stage.
"""

from __future__ import annotations

import argparse
import json
import logging
import shutil
from functools import partial
from itertools import product
from pathlib import Path
from statistics import fmean
from typing import Any, NamedTuple

from d1.runs.cli import OneLineParser, run_script
from d1.runs.record import run_record
from studies.json_lines import Run, complete, read_lines
from studies.leaderboard.plan import TASKS, Setup, best_rate
from studies.leaderboard.run import commit, evaluate, logs_of, make_start, train_from
from studies.samplers.rollouts import CANVAS, METHOD, RATE, TASK

DATA = Path(__file__).parent / "data"
TOKENS = 2_150_000  # a third of what exact rollouts cost in studies/samplers
SECONDS = 48.0  # processor seconds of training of a run of `prefix` there
RATES = (1e-4, 2e-4, 4e-4)
SERIES: tuple[str, ...] = (
    "rewards/accuracy/mean",
    "places/nll",
    "places/tokens_nll",
    "places/log_weight",
    "places/effective",
)
SERIES += ("places/no_support", "places/impossible", "places/dropped")

THRESHOLD = ("--sampler", "parallel", "--reveal", "threshold", "--reveal_level", "0.95")
PREFIX: tuple[str, ...] = ("--sampler", "cached+parallel", "--kv_cache", "prefix", *THRESHOLD[2:])
STEPS = ("--segment_steps", "1", "--loss_type", "sum")
PLACES: tuple[str, ...] = ("--estimator", "places", "--objective", "clipped_places", "--loss_type", "sum")
PLACES += ("--scored_tokens", "completed")
GUMBEL = ("--remasking", "gumbel", "--order_temperature", "0.05")
ARMS: dict[str, tuple[str, ...]] = {
    "exact": (),
    "P8": THRESHOLD,
    "P": (*THRESHOLD, *STEPS),
    "P+": (*THRESHOLD, *PLACES),
    "C8": PREFIX,
    "C": (*PREFIX, *STEPS),
    "C+": (*PREFIX, *PLACES),
    "C+w": (*PREFIX, *PLACES, "--trajectory_weight_cap", "2"),
    "G": (*THRESHOLD, *GUMBEL, *PLACES),
}


class Stage(NamedTuple):
    """Arms and seeds, the problems that judge them, learning rates, and the budget (None: steps)."""

    split: str
    seeds: range
    arms: tuple[str, ...]
    rates: tuple[float, ...] = (RATE,)
    steps: int | None = None
    flags: tuple[str, ...] = ()
    equal: str = "tokens"


FAST = tuple(ARMS)[1:]
STAGES = {
    "logs": Stage("test", range(40, 60), ("C8",), steps=96, flags=("--log_places", "true")),
    "test": Stage("test", range(80, 100), FAST, steps=96),
    # Exact rollouts have their own budget, the 100 steps of studies/samplers: the reference of the goal.
    "reference": Stage("test", range(80, 100), ("exact",), steps=100),
    "tokens": Stage("test", range(80, 100), FAST),
    "rates": Stage("validation", range(64, 66), FAST, RATES),
    "seconds": Stage("test", range(80, 100), FAST, equal="seconds"),
}


def flags_of(arm: str, seed: int, rate: float, budget: list[object]) -> list[str]:
    """The flags of RL that define a run, in addition to pocket.yaml's."""
    flags: list[object] = [*METHOD, *CANVAS, "--dataset", TASKS[TASK].dataset, *TASKS[TASK].flags, "--seed", seed]
    flags += ["--num_generations", 8, "--learning_rate", rate, "--lr_scheduler_type", "linear"]
    flags += ["--lr_scheduler_kwargs", "{}", "--warmup_steps", 0, *budget, *ARMS[arm]]
    return [*map(str, flags)]


def tokens_for(seconds: float, arm: str) -> int:
    """The tokens that an arm's training processes in so many processor seconds, by its runs of the stage `test`.

    Raises:
        ValueError: that stage has no run of the arm.
    """
    own = [line for line in read_lines(DATA / "test.jsonl") if line["arm"] == arm]
    if not own:
        raise ValueError(f"stage seconds: data/test.jsonl has no run of {arm}, which says what a second buys: run test")
    return round(seconds * sum(line["compute"] for line in own) / sum(line["processor_seconds"] for line in own))


def chosen_rate(arm: str) -> float:
    """The rate that the stage `rates` found for an arm; ValueError if a run of it is missing."""
    own = (line for line in read_lines(DATA / "rates.jsonl") if line["arm"] == arm)
    return best_rate(own, RATES, len(STAGES["rates"].seeds), f"{arm}, stage rates,")


def trained(run: Run, stage: Stage, start: Path, folder: Path, quick: bool) -> dict[str, Any]:
    """Trains; returns the run's settings, its error if the loss or the weights did not stay finite, its costs, and
    what it logged in each rollout."""
    rate = chosen_rate(run["arm"]) if stage.equal == "seconds" else run["rate"]
    budget: list[object] = ["--max_steps", stage.steps]
    if quick:
        budget = ["--max_steps", 3]
    elif stage.steps is None:
        tokens = TOKENS if stage.equal == "tokens" else tokens_for(SECONDS, run["arm"])
        budget = ["--max_compute_tokens", tokens, "--max_steps", 100_000]
    flags = [*flags_of(run["arm"], run["seed"], rate, budget), *stage.flags]
    error = train_from(start, folder, flags)
    file = folder / "metrics.jsonl"
    logs = [json.loads(line) for line in file.read_text().splitlines()] if file.exists() else []
    series = {name: [float(f"{log[name]:.4g}") for log in logs if name in log] for name in SERIES}
    fed = [log["sampling/forward_tokens"] for log in logs if "sampling/forward_tokens" in log]
    found = {"settings": flags, "error": error, **logs_of(folder), "completion_tokens": round(fmean(fed or [0]), 1)}
    return found | {"series": {name: values for name, values in series.items() if values}}


def line(stage: str, run: Run, folder: Path, quick: bool = False) -> dict[str, Any]:
    """Trains, and judges by the exact sampler; a model that did not stay finite has solved nothing."""
    chosen, own = STAGES[stage], folder / "-".join(map(str, (stage, *run.values())))
    start = make_start(folder, Setup(TASK, "sft"), run["seed"])
    shutil.rmtree(own, ignore_errors=True)  # left by a killed run
    found = trained(run, chosen, start, own, quick)
    limit = ["--limit", "32"] if quick else []
    model = start if found["error"] else own
    judged = evaluate(TASK, model, own / "judged", ["--split", chosen.split, *limit])
    right = "0" * len(judged["right"]) if found["error"] else judged["right"]
    shutil.rmtree(own)
    return found | {"right": right, "problems": judged["problems"], "commit": commit(), **run_record()}


def runs(stage: str) -> list[Run]:
    """The runs of a stage, seed by seed, so that an incomplete study has all arms."""
    chosen = STAGES[stage]
    each = product(chosen.seeds, chosen.arms, chosen.rates)
    names = ("arm", "seed", "rate") if len(chosen.rates) > 1 else ("arm", "seed")
    return [dict(zip(names, (arm, seed, rate), strict=False)) for seed, arm, rate in each]


def line_of_stage(stage: str, folder: Path, quick: bool, run: Run) -> dict[str, Any]:
    return line(stage, {"rate": RATE, **run}, folder, quick)


def make_parser() -> argparse.ArgumentParser:
    parser = OneLineParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("stages", nargs="+", choices=["untrained", *STAGES])
    parser.add_argument("--quick", action="store_true", help="one seed, three steps and 32 problems; leaves no data")
    parser.add_argument("--arms", nargs="+", choices=[*ARMS], help="only these")
    parser.add_argument("--output_dir", default="runs/collapse", help="of the models (default: %(default)s)")
    return parser


def main(args: argparse.Namespace) -> None:
    folder = Path(args.output_dir).resolve()
    folder.mkdir(parents=True, exist_ok=True)
    for stage in args.stages:
        if stage == "untrained":
            from studies.collapse.untrained import DATA as FILE
            from studies.collapse.untrained import line_of, models

            complete(FILE, models(args.quick), folder, lambda run: line_of(run, folder))
            continue
        chosen = [run for run in runs(stage) if args.arms is None or run["arm"] in args.arms]
        if args.quick:
            chosen = [run for run in chosen if run["seed"] == STAGES[stage].seeds[0]]
        file = folder / f"quick-{stage}.jsonl" if args.quick else DATA / f"{stage}.jsonl"
        complete(file, chosen, folder, partial(line_of_stage, stage, folder, args.quick))


if __name__ == "__main__":
    logging.basicConfig(level=logging.INFO, format="%(message)s")
    run_script("studies.collapse.run", lambda: main(make_parser().parse_args()))
