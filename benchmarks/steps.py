"""Whole optimizer steps by phase: the real trainers on small jobs, the same with the published pieces, the bare passes.

    rl        one rollout and its mu optimizer steps: sampling, rewards, old and reference log-probs, updates, AdamW
    sft       a few optimizer steps: collating, noise, loss and gradients, AdamW
    methods   what each RL method costs: its rollout and updates next to the bare passes

`pocket` is the pocket model with its own task and data, as `diffu-grpo/pocket.yaml` trains it; the other sizes are
random models on random words.
"""

from __future__ import annotations

import functools
import gc
import statistics
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from benchmarks.clock import Clock
from benchmarks.machine import race
from benchmarks.rl_steps import WAYS, Work, bare_rl, rl_trainer, train_rl
from benchmarks.sft_steps import PublishedSFT, bare_sft, dLLMTrainer, sft_trainer
from d1.rl.methods import METHODS

Runs = dict[str, Callable[[], Any]]


def rl_runs(args: Any, folder: Path, clocks: dict[str, Clock], **changes: Any) -> tuple[Runs, dict[str, Work]]:
    """The runs that have a clock, and what the trainers sampled and scored in their last ones."""
    trainers = {way: rl_trainer(args, folder, clocks[way], **changes) for way in WAYS if way in clocks}
    last: dict[str, Work] = {}

    def train(way: str) -> None:
        last[way] = train_rl(trainers[way], way, clocks[way])

    runs = {way: functools.partial(train, way) for way in trainers}
    bare = {"bare": lambda: bare_rl(trainers["ours"], last["ours"], clocks["bare"])}
    return {"ours": runs.pop("ours")} | bare | runs, last


def sft_runs(args: Any, folder: Path, clocks: dict[str, Clock]) -> Runs:
    ours = sft_trainer(dLLMTrainer, args, folder, clocks["ours"])
    theirs = sft_trainer(PublishedSFT, args, folder, clocks["published"])
    return {"ours": ours.train, "bare": lambda: bare_sft(ours, clocks["bare"]), "published": theirs.train}


def race_clocked(runs: Runs, clocks: dict[str, Clock], repeats: int) -> tuple[dict[str, Any], dict[str, Any]]:
    """The race of runs that clock themselves, against `bare`, and the seconds of each by phase (medians)."""
    rounds: dict[str, list[dict[str, float]]] = {name: [] for name in runs}

    def timed(name: str) -> tuple[float, float]:
        clock = clocks[name]
        clock.wall.clear()
        clock.cpu.clear()
        runs[name]()
        rounds[name].append((clock.wall if torch.cuda.is_available() else clock.cpu).copy())
        return sum(clock.wall.values()), sum(clock.cpu.values())

    results = race({name: functools.partial(timed, name) for name in runs}, repeats, base="bare", clocked=True)
    phases = {
        phase: {name: statistics.median(seconds[phase] for seconds in found[1:]) for name, found in rounds.items()}
        for phase in next(iter(rounds.values()))[0]
    }
    return results, phases


def bare_share(results: dict[str, dict[str, float]]) -> tuple[float, float, float]:
    """The bare passes' share of our whole: median, lowest and highest of the rounds."""
    share, low, high = (1 / results["ours"][key] for key in ("ratio", "ratio_high", "ratio_low"))
    return share, low, high


def race_steps(args: Any) -> dict[str, Any]:
    """Ours, the bare passes and the published way: the race, seconds by phase (medians), and the share of the bare."""
    clocks = {name: Clock() for name in ("ours", "bare", "published")}
    with tempfile.TemporaryDirectory() as folder:
        given = args, Path(folder), clocks
        runs = rl_runs(*given)[0] if args.what == "rl" else sft_runs(*given)
        results, phases = race_clocked(runs, clocks, args.repeats)
    share, low, high = bare_share(results)
    remark = f"Share of the bare forward and backward passes in our whole: {share:.1%} ({low:.1%} to {high:.1%})."
    return {"results": results, "seconds by phase": phases, "remarks": [remark]}


def passes_made(work: Work) -> tuple[float, float]:
    """Forward and backward passes per row: forward those of sampling, scoring and updates, computed again or not."""
    [(_, sampled)] = work.rollouts
    forward, backward = sampled.passes.sum().item(), 0
    for call in work.scored:
        parts = call.passes()
        pairs = sum(map(len, parts))
        forward += pairs * (2 if call.with_gradients and len(parts) > 1 else 1)
        backward += pairs if call.with_gradients else 0
    return forward / len(sampled.ids), backward / len(sampled.ids)


def race_method(name: str, args: Any, folder: Path) -> dict[str, float]:
    """One rollout with its updates, at most `args.mu` of them, against the bare passes."""
    values = METHODS[name].values
    # Which prompts count needs a task's accuracy, and takes nothing from the passes.
    changes = values | {"num_iterations": min(values["num_iterations"], args.mu), "right_share": None}
    clocks = {"ours": Clock(), "bare": Clock()}
    runs, last = rl_runs(args, folder, clocks, method=name, **changes)
    gc.collect()
    gc.freeze()  # each `train()` begins with a collection of all libraries' objects; a real run begins once
    results, _ = race_clocked(runs, clocks, args.repeats)
    gc.unfreeze()
    kind = "wall_seconds" if torch.cuda.is_available() else "cpu_seconds"
    forward, backward = passes_made(last["ours"])
    share, low, high = bare_share(results)
    return {
        "updates": changes["num_iterations"],
        "forward passes per row": forward,
        "backward passes per row": backward,
        "seconds": results["ours"][kind],
        "bare share, %": 100 * share,
        "lowest": 100 * low,
        "highest": 100 * high,
    }


def race_methods(args: Any) -> dict[str, Any]:
    results = {}
    for name in METHODS:
        with tempfile.TemporaryDirectory() as folder:
            results[name] = race_method(name, args, Path(folder))
    return {"results": results}
