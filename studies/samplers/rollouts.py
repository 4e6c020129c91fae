"""Train with fast rollouts and with exact ones: a line per run in data/rollouts.jsonl. README.md has the protocol.

    OMP_NUM_THREADS=1 python -m studies.samplers.rollouts                   # the test, then the trial
    OMP_NUM_THREADS=1 python -m studies.samplers.rollouts --stages trial

Each run starts from the SFT model of its seed. If the command is killed, run it again; several processes share the
work.
"""

from __future__ import annotations

import argparse
import json
import logging
import shutil
from collections.abc import Mapping
from itertools import product
from pathlib import Path
from statistics import fmean
from typing import Any, NamedTuple

from d1.runs.cli import OneLineParser, run_script
from d1.runs.record import run_record
from studies.json_lines import complete
from studies.leaderboard.plan import TASKS, Setup
from studies.leaderboard.run import commit, evaluate, logs_of, make_start, train_from

DATA = Path(__file__).parent / "data" / "rollouts.jsonl"
TASK, RATE = "arithmetic", 2e-4
EXACT = "exact"
# TraceRL's row with one update per rollout, as in the earlier study, so that rollouts are most of the compute.
METHOD = ("--method", "tracerl", "--num_iterations", 1, "--split_views", "false", "--views_at_once", 64)
CANVAS = ("--block_length", 8, "--diffusion_steps", 16)


class Arm(NamedTuple):
    """What the runs of an arm share: the cache of rollouts (None: the exact sampler), steps, flags that override."""

    cache: str | None
    steps: int
    flags: tuple[str, ...] = ()

    @property
    def sampler(self) -> list[str]:
        """The flags of its rollouts and, in evaluation, of its own sampler."""
        fast = ["--sampler", "cached+parallel", "--kv_cache", self.cache, "--reveal", "threshold"]
        return [*map(str, CANVAS), *([*map(str, fast), "--reveal_level", "0.95"] if self.cache else [])]


class Stage(NamedTuple):
    """Arms and seeds, and the problems that judge them."""

    split: str
    seeds: range
    arms: Mapping[str, Arm]


ARMS = {EXACT: Arm(None, 100), "lasting": Arm("lasting", 174)}
CAUSES = {  # why `lasting` may lose: one setting each
    "lasting, gradient norm 0.2": Arm("lasting", 174, ("--max_grad_norm", "0.2")),
    "lasting, temperature 0.9": Arm("lasting", 174, ("--temperature", "0.9")),
    "lasting, two steps per view": Arm("lasting", 174, ("--segment_steps", "2")),
    "lasting, half the rate": Arm("lasting", 174, ("--learning_rate", "1e-4")),
}
STAGES = {
    "test": Stage("test", range(40, 60), ARMS | {"prefix": Arm("prefix", 96)}),
    "trial": Stage("validation", range(64, 68), ARMS | CAUSES),
}


def settings(arm: Arm, seed: int, steps: int = 0) -> list[str]:
    """The flags of RL that define a run, in addition to pocket.yaml's; `steps`, if above 0, replaces the arm's."""
    flags: list[object] = [*METHOD, *arm.sampler, "--dataset", TASKS[TASK].dataset, *TASKS[TASK].flags]
    flags += ["--seed", seed, "--num_generations", 8, "--learning_rate", RATE, "--lr_scheduler_type", "linear"]
    flags += ["--lr_scheduler_kwargs", "{}", "--warmup_steps", 0, "--max_steps", steps or arm.steps]
    return [*map(str, flags), *arm.flags]


def trained(arm: Arm, seed: int, start: Path, folder: Path, steps: int) -> dict[str, Any]:
    """Trains; returns the run's settings, its error if the loss or the weights did not stay finite, its costs, and the
    share of right completions in each rollout."""
    flags = settings(arm, seed, steps)
    error = train_from(start, folder, flags)
    file = folder / "metrics.jsonl"
    logs = [json.loads(line) for line in file.read_text().splitlines()] if file.exists() else []
    tokens = [log["sampling/forward_tokens"] for log in logs if "sampling/forward_tokens" in log]
    sampled = [round(log["rewards/accuracy/mean"], 4) for log in logs if "rewards/accuracy/mean" in log]
    found = {"settings": flags, "error": error, **logs_of(folder), "sampled": sampled}
    return found | {"completion_tokens": round(fmean(tokens or [0.0]), 1)}


def judged(arm: Arm, model: Path, folder: Path, flags: list[str]) -> dict[str, Any]:
    """The problems that a model solves, by the exact sampler and by that of the arm's rollouts."""
    by: dict[str, list[str]] = {EXACT: []} | ({"own": arm.sampler} if arm.cache else {})
    found = {name: evaluate(TASK, model, folder / f"by_{name}", [*flags, *sampler]) for name, sampler in by.items()}
    return {"right": {name: one["right"] for name, one in found.items()}, "problems": found[EXACT]["problems"]}


def line(run: Mapping[str, Any], folder: Path, limit: int = 0, steps: int = 0) -> dict[str, Any]:
    """Trains and judges; leaves no files but the model that the run starts from. A model that did not stay finite has
    solved nothing. For a quick look, `limit` problems and `steps` steps; 0: all."""
    stage = STAGES[run["stage"]]
    arm, own = stage.arms[run["arm"]], folder / "-".join(map(str, run.values()))
    start = make_start(folder, Setup(TASK, "sft"), run["seed"])
    shutil.rmtree(own, ignore_errors=True)  # left by a killed run
    found = trained(arm, run["seed"], start, own, steps)
    flags = ["--split", stage.split, *(["--limit", str(limit)] if limit else [])]
    found |= judged(arm, start if found["error"] else own, own, flags)
    if found["error"]:
        found["right"] = {name: "0" * len(right) for name, right in found["right"].items()}
    shutil.rmtree(own)
    return found | {"commit": commit(), **run_record()}


def runs(stage: str) -> list[dict[str, Any]]:
    """The runs of a stage, seed by seed, so that an incomplete study has all arms."""
    each = product(STAGES[stage].seeds, STAGES[stage].arms)
    return [{"stage": stage, "arm": arm, "seed": seed} for seed, arm in each]


def make_parser() -> argparse.ArgumentParser:
    parser = OneLineParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--stages", nargs="+", choices=[*STAGES], default=[*STAGES])
    parser.add_argument("--output_dir", default="runs/rollouts", help="of the models (default: %(default)s)")
    return parser


def main(args: argparse.Namespace) -> None:
    folder = Path(args.output_dir).resolve()
    folder.mkdir(parents=True, exist_ok=True)
    for stage in args.stages:
        complete(DATA, runs(stage), folder, lambda run: line(run, folder))


if __name__ == "__main__":
    logging.basicConfig(level=logging.INFO, format="%(message)s")
    run_script("studies.samplers.rollouts", lambda: main(make_parser().parse_args()))
