"""Fast rollouts in RL next to exact ones: PROTOCOL.md says what is run; a line per run in data/STAGE.jsonl.

    OMP_NUM_THREADS=1 python -m studies.collapse.run test reference    # at equal rollouts, and exact rollouts
    OMP_NUM_THREADS=1 python -m studies.collapse.run tokens third      # at a third of the tokens, both flags
    OMP_NUM_THREADS=1 python -m studies.collapse.run start             # the SFT models that all runs start from
    OMP_NUM_THREADS=1 python -m studies.collapse.run test --quick      # one short run of each arm, in another folder

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
from studies.json_lines import Run, complete
from studies.training import TASKS, Setup, commit, evaluate, logs_of, make_start, train_from

DATA = Path(__file__).parent / "data"
TASK, RATE = "arithmetic", 2e-4
TOKENS = 2_150_000  # a third of what exact rollouts cost in 100 updates
# TraceRL's row with one update per rollout, so that rollouts are most of the compute.
METHOD = ("--method", "tracerl", "--num_iterations", 1, "--split_views", "false", "--views_at_once", 64)
CANVAS = ("--block_length", 8, "--diffusion_steps", 16)

THRESHOLD = ("--sampler", "parallel", "--reveal", "threshold", "--reveal_level", "0.95")
PREFIX: tuple[str, ...] = ("--sampler", "cached+parallel", "--kv_cache", "prefix", *THRESHOLD[2:])
DUAL: tuple[str, ...] = (*PREFIX[:3], "dual", *THRESHOLD[2:])
SINGLE_STEPS, SUM = ("--segment_steps", "1"), ("--loss_type", "sum")
STEPS = (*SINGLE_STEPS, *SUM)
ARMS: dict[str, tuple[str, ...]] = {
    "exact": (),
    "P8": THRESHOLD,
    "P": (*THRESHOLD, *STEPS),
    "C8": PREFIX,
    "C": (*PREFIX, *STEPS),
}
# Arms whose runs are in data/, and whose flags are no longer part of the library: they run at commit 6fbae12b.
ARCHIVED = ("P+", "C+", "C+w", "G")
# Rollouts (E: exact, P: threshold, C: with `prefix`, D: with `dual`), steps per view, and loss over a completion.
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
START = "start"  # the SFT models themselves, on the problems that judge the others


class Stage(NamedTuple):
    """Arms and seeds, and optimizer steps (None: a budget in tokens)."""

    seeds: range
    arms: tuple[str, ...]
    steps: int | None = None


FAST = ("P8", "P", "P+", "C8", "C", "C+", "C+w", "G")
STAGES = {
    "test": Stage(range(80, 100), FAST, steps=96),
    "reference": Stage(range(80, 100), ("exact",), steps=100),
    "tokens": Stage(range(80, 100), FAST),
    "third": Stage(range(80, 100), tuple(THIRD)),
    "start": Stage(range(80, 100), (START,), steps=0),
}


def flags_of(arm: str, seed: int, budget: list[object]) -> list[str]:
    """The flags of RL that define a run, in addition to pocket.yaml's."""
    flags: list[object] = [*METHOD, *CANVAS, "--dataset", TASKS[TASK].dataset, *TASKS[TASK].flags, "--seed", seed]
    flags += ["--num_generations", 8, "--learning_rate", RATE, "--lr_scheduler_type", "linear"]
    flags += ["--lr_scheduler_kwargs", "{}", "--warmup_steps", 0, *budget, *(ARMS | THIRD)[arm]]
    return [*map(str, flags)]


def trained(stage: str, run: Run, start: Path, folder: Path, quick: bool) -> dict[str, Any]:
    """Trains; returns the run's settings, its error if the loss or the weights did not stay finite, its costs, and
    the share of right completions in each rollout."""
    steps = STAGES[stage].steps
    budget: list[object] = ["--max_steps", steps]
    if quick:
        budget = ["--max_steps", 3]
    elif steps is None:
        budget = ["--max_compute_tokens", TOKENS, "--max_steps", 100_000]
    flags = flags_of(run["arm"], run["seed"], budget)
    error = train_from(start, folder, flags)
    file = folder / "metrics.jsonl"
    logs = [json.loads(line) for line in file.read_text().splitlines()] if file.exists() else []
    right = [float(f"{log['rewards/accuracy/mean']:.4g}") for log in logs if "rewards/accuracy/mean" in log]
    computed = [log["sampling/forward_tokens"] for log in logs if "sampling/forward_tokens" in log]
    found = {"settings": flags, "error": error, **logs_of(folder)}
    found["completion_tokens"] = round(fmean(computed or [0]), 1)
    return found | {"series": {"rewards/accuracy/mean": right}}


def line(stage: str, folder: Path, quick: bool, run: Run) -> dict[str, Any]:
    """Trains, and judges by the exact sampler; a model that did not stay finite has solved nothing. The arm `START` is
    judged without training."""
    own = folder / "-".join(map(str, (stage, *run.values())))
    start = make_start(folder, Setup(TASK, "sft"), run["seed"])
    shutil.rmtree(own, ignore_errors=True)  # left by a killed run
    found = {"error": None} if run["arm"] == START else trained(stage, run, start, own, quick)
    limit = ["--limit", "32"] if quick else []
    model = start if found["error"] or run["arm"] == START else own
    judged = evaluate(TASK, model, own / "judged", ["--split", "test", *limit])
    right = "0" * len(judged["right"]) if found["error"] else judged["right"]
    shutil.rmtree(own)
    return found | {"right": right, "problems": judged["problems"], "commit": commit(), **run_record()}


def runs(stage: str) -> list[Run]:
    """The runs of a stage, seed by seed, so that an incomplete study has all arms."""
    chosen = STAGES[stage]
    return [{"arm": arm, "seed": seed} for seed, arm in product(chosen.seeds, chosen.arms)]


def make_parser() -> argparse.ArgumentParser:
    parser = OneLineParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("stages", nargs="+", choices=[*STAGES])
    parser.add_argument("--quick", action="store_true", help="one seed, three steps and 32 problems, in --output_dir")
    parser.add_argument("--seeds", nargs="+", type=int, help="only these, in this order")
    parser.add_argument("--arms", nargs="+", choices=[*ARMS, *THIRD, START], help="only these")
    parser.add_argument("--output_dir", default="runs/collapse", help="of the models (default: %(default)s)")
    return parser


def chosen_runs(stage: str, args: argparse.Namespace) -> list[Run]:
    """The runs of a stage that the flags choose.

    Raises:
        ValueError: the stage has no such seed, or none of the arms.
    """
    seeds = [*STAGES[stage].seeds] if args.seeds is None else args.seeds
    unknown = [seed for seed in seeds if seed not in STAGES[stage].seeds]
    if unknown:
        first, last = STAGES[stage].seeds[0], STAGES[stage].seeds[-1]
        raise ValueError(f"--seeds {' '.join(map(str, unknown))}: the seeds of {stage} are {first} to {last}")
    arms = [arm for arm in STAGES[stage].arms if arm not in ARCHIVED]
    if args.arms is not None and not {*args.arms} & {*arms}:
        raise ValueError(f"--arms {' '.join(args.arms)}: the arms of {stage} are {', '.join(arms)}")
    if args.quick:
        seeds = seeds[:1]
    return [{"arm": arm, "seed": seed} for seed, arm in product(seeds, arms) if args.arms is None or arm in args.arms]


def main(args: argparse.Namespace) -> None:
    folder = Path(args.output_dir).resolve()
    folder.mkdir(parents=True, exist_ok=True)
    chosen = {stage: chosen_runs(stage, args) for stage in args.stages}
    for stage, of_stage in chosen.items():
        file = DATA / f"{stage}.jsonl"
        if args.quick:
            file = folder / f"quick-{stage}.jsonl"
            file.unlink(missing_ok=True)  # of an earlier trial
        complete(file, of_stage, folder, partial(line, stage, folder, args.quick))


if __name__ == "__main__":
    logging.basicConfig(level=logging.INFO, format="%(message)s")
    run_script("studies.collapse.run", lambda: main(make_parser().parse_args()))
