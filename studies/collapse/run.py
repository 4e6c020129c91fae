"""Why training on fast rollouts collapses: PROTOCOL.md says what is run; a line per run in data/STAGE.jsonl.

    OMP_NUM_THREADS=1 python -m studies.collapse.run untrained    # gradients before training, per sampler and estimator
    OMP_NUM_THREADS=1 python -m studies.collapse.run logs         # `prefix` again, with the probability of its rollouts
    OMP_NUM_THREADS=1 python -m studies.collapse.run test         # the registered test, at equal rollouts
    OMP_NUM_THREADS=1 python -m studies.collapse.run reference tokens rates goal seconds    # at equal tokens, seconds
    OMP_NUM_THREADS=1 python -m studies.collapse.run third        # steps per view and loss, exact and fast, at equal tokens
    OMP_NUM_THREADS=1 python -m studies.collapse.run test --quick     # one short run of each arm, in another folder

If a command is killed, run it again; several processes share the work of a stage.
"""

from __future__ import annotations

import argparse
import json
import logging
import shutil
from collections.abc import Sequence
from functools import partial
from itertools import product
from pathlib import Path
from statistics import fmean
from typing import Any, NamedTuple

from d1.runs.cli import OneLineParser, run_script
from d1.runs.record import run_record
from studies.json_lines import Run, complete, read_lines
from studies.leaderboard.plan import TASKS, Setup, accuracy, best_rate
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
LASTING: tuple[str, ...] = (*PREFIX[:3], "lasting", *THRESHOLD[2:])
DUAL: tuple[str, ...] = (*PREFIX[:3], "dual", *THRESHOLD[2:])
SINGLE_STEPS, SUM = ("--segment_steps", "1"), ("--loss_type", "sum")
STEPS = (*SINGLE_STEPS, *SUM)
SHARED = ("--segment_steps", "1", "--num_iterations", "2", "--split_views", "true")
DRAWN = (*STEPS, "--num_views", "2")
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
CHEAPER: dict[str, tuple[str, ...]] = {
    "P-2": (*THRESHOLD, *SHARED),
    "C-2": (*PREFIX, *SHARED),
    "C-v": (*PREFIX, *DRAWN),
    "L": (*LASTING, *STEPS),
    "L-2": (*LASTING, *SHARED),
    "L-v": (*LASTING, *DRAWN),
}
# Rollouts (E: exact, P: threshold, C: with `prefix`, D: with `dual`), most steps per view, and the loss over a completion.
# P8, P, C8 and C above are P8-mean, P1-sum, C8-mean and C1-sum.
THIRD: dict[str, tuple[str, ...]] = {
    "E8-mean": (),
    "E8-sum": SUM,
    "E1-mean": SINGLE_STEPS,
    "E1-sum": STEPS,
    "P8-sum": (*THRESHOLD, *SUM),
    "P1-mean": (*THRESHOLD, *SINGLE_STEPS),
    "C8-sum": (*PREFIX, *SUM),
    "D8-sum": (*DUAL, *SUM),
}
BEST = "best"  # of `SINGLE` and their rates, in the stage `rates`


class Stage(NamedTuple):
    """Arms and seeds, the problems that judge them, learning rates, and optimizer steps (None: a budget in tokens)."""

    split: str
    seeds: range
    arms: tuple[str, ...]
    rates: tuple[float, ...] = (RATE,)
    steps: int | None = None
    flags: tuple[str, ...] = ()


FAST = tuple(ARMS)[1:]
SINGLE = (*(arm for arm in FAST if arm not in ("P8", "C8", "G")), *CHEAPER)
STAGES = {
    "logs": Stage("test", range(40, 60), ("C8",), steps=96, flags=("--log_places", "true")),
    "test": Stage("test", range(80, 100), FAST, steps=96),
    # Exact rollouts have their own budget, the 100 steps of studies/samplers: the reference of the goal.
    "reference": Stage("test", range(80, 100), ("exact",), steps=100),
    "tokens": Stage("test", range(80, 100), FAST),
    "rates": Stage("validation", range(64, 66), (*FAST, *CHEAPER), RATES),
    "goal": Stage("test", range(80, 100), (BEST,)),
    "seconds": Stage("test", range(80, 100), FAST),
    "third": Stage("test", range(80, 100), tuple(THIRD)),
}


def flags_of(arm: str, seed: int, rate: float, budget: list[object]) -> list[str]:
    """The flags of RL that define a run, in addition to pocket.yaml's."""
    flags: list[object] = [*METHOD, *CANVAS, "--dataset", TASKS[TASK].dataset, *TASKS[TASK].flags, "--seed", seed]
    flags += ["--num_generations", 8, "--learning_rate", rate, "--lr_scheduler_type", "linear"]
    flags += ["--lr_scheduler_kwargs", "{}", "--warmup_steps", 0, *budget, *(ARMS | CHEAPER | THIRD)[arm]]
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


def chosen_rate(arm: str, search: Sequence[Run]) -> float:
    """The best rate of an arm in the lines of the stage `rates`; ValueError if a run of it is missing."""
    own = (line for line in search if line["arm"] == arm)
    return best_rate(own, RATES, len(STAGES["rates"].seeds), f"{arm}, stage rates,")


def mean_accuracy(arm: str, rate: float, search: Sequence[Run]) -> float:
    return fmean(accuracy(line["right"]) for line in search if (line["arm"], line["rate"]) == (arm, rate))


def setting_of(stage: str, run: Run) -> tuple[str, float]:
    """The arm and the rate that a run trains; ValueError if they come from the stage `rates` and a run is missing."""
    if stage not in ("goal", "seconds"):
        return run["arm"], run.get("rate", RATE)
    search = read_lines(DATA / "rates.jsonl")
    rates = {arm: chosen_rate(arm, search) for arm in (SINGLE if run["arm"] == BEST else [run["arm"]])}
    return max(rates.items(), key=lambda setting: mean_accuracy(setting[0], setting[1], search))


def trained(stage: str, run: Run, start: Path, folder: Path, quick: bool) -> dict[str, Any]:
    """Trains; returns the run's settings, its error if the loss or the weights did not stay finite, its costs, and
    what it logged in each rollout."""
    chosen, (arm, rate) = STAGES[stage], setting_of(stage, run)
    budget: list[object] = ["--max_steps", chosen.steps]
    if quick:
        budget = ["--max_steps", 3]
    elif chosen.steps is None:
        tokens = tokens_for(SECONDS, arm) if stage == "seconds" else TOKENS
        budget = ["--max_compute_tokens", tokens, "--max_steps", 100_000]
    flags = [*flags_of(arm, run["seed"], rate, budget), *chosen.flags]
    error = train_from(start, folder, flags)
    file = folder / "metrics.jsonl"
    logs = [json.loads(line) for line in file.read_text().splitlines()] if file.exists() else []
    series = {name: [float(f"{log[name]:.4g}") for log in logs if name in log] for name in SERIES}
    fed = [log["sampling/forward_tokens"] for log in logs if "sampling/forward_tokens" in log]
    found = {"setting": [arm, rate], "settings": flags, "error": error, **logs_of(folder)}
    found["completion_tokens"] = round(fmean(fed or [0]), 1)
    return found | {"series": {name: values for name, values in series.items() if values}}


def line(stage: str, folder: Path, quick: bool, run: Run) -> dict[str, Any]:
    """Trains, and judges by the exact sampler; a model that did not stay finite has solved nothing."""
    own = folder / "-".join(map(str, (stage, *run.values())))
    start = make_start(folder, Setup(TASK, "sft"), run["seed"])
    shutil.rmtree(own, ignore_errors=True)  # left by a killed run
    found = trained(stage, run, start, own, quick)
    limit = ["--limit", "32"] if quick else []
    model = start if found["error"] else own
    judged = evaluate(TASK, model, own / "judged", ["--split", STAGES[stage].split, *limit])
    right = "0" * len(judged["right"]) if found["error"] else judged["right"]
    shutil.rmtree(own)
    return found | {"right": right, "problems": judged["problems"], "commit": commit(), **run_record()}


def runs(stage: str) -> list[Run]:
    """The runs of a stage, seed by seed, so that an incomplete study has all arms."""
    chosen = STAGES[stage]
    each = product(chosen.seeds, chosen.arms, chosen.rates)
    names = ("arm", "seed", "rate") if len(chosen.rates) > 1 else ("arm", "seed")
    return [dict(zip(names, (arm, seed, rate), strict=False)) for seed, arm, rate in each]


def make_parser() -> argparse.ArgumentParser:
    parser = OneLineParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("stages", nargs="+", choices=["untrained", *STAGES])
    parser.add_argument("--quick", action="store_true", help="one seed, three steps and 32 problems; leaves no data")
    parser.add_argument("--seeds", nargs="+", type=int, help="only these, in this order")
    parser.add_argument("--arms", nargs="+", choices=[*ARMS, *CHEAPER, *THIRD, BEST], help="only these")
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
        if args.seeds is not None:
            chosen = [run for seed in args.seeds for run in chosen if run["seed"] == seed]
        if args.quick:
            chosen = [run for run in chosen if run["seed"] == STAGES[stage].seeds[0]]
        file = folder / f"quick-{stage}.jsonl" if args.quick else DATA / f"{stage}.jsonl"
        complete(file, chosen, folder, partial(line, stage, folder, args.quick))


if __name__ == "__main__":
    logging.basicConfig(level=logging.INFO, format="%(message)s")
    run_script("studies.collapse.run", lambda: main(make_parser().parse_args()))
