"""Whole optimizer steps by phase: the real trainers on small jobs, the same with the published pieces, the bare passes.

    rl    one rollout and its mu optimizer steps: sampling, rewards, old and reference log-probs, updates, AdamW
    sft   a few optimizer steps: collating, noise, loss and gradients, AdamW

`pocket` is the pocket model with its own task and data, as `diffu-grpo/pocket.yaml` trains it; the other sizes are
random models on random words.
"""

from __future__ import annotations

import functools
import statistics
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from benchmarks.clock import Clock
from benchmarks.machine import race
from benchmarks.rl_steps import Work, bare_rl, rl_trainer, train_rl
from benchmarks.sft_steps import PublishedSFT, bare_sft, dLLMTrainer, sft_trainer

Runs = dict[str, Callable[[], Any]]


def rl_runs(args: Any, folder: Path, clocks: dict[str, Clock]) -> Runs:
    trainers = {way: rl_trainer(args, folder, clocks[way]) for way in ("ours", "published")}
    last: list[Work] = []

    def ours() -> None:
        last[:] = [train_rl(trainers["ours"], "ours", clocks["ours"])]

    return {
        "ours": ours,
        "bare": lambda: bare_rl(trainers["ours"], last[0], clocks["bare"]),
        "published": lambda: train_rl(trainers["published"], "published", clocks["published"]),
    }


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


def race_steps(kind: str, args: Any, folder: Path) -> dict[str, Any]:
    """Ours, the bare passes and the published way: the race, seconds by phase (medians), and the share of the bare."""
    clocks = {name: Clock() for name in ("ours", "bare", "published")}
    runs = (rl_runs if kind == "rl" else sft_runs)(args, folder, clocks)
    results, phases = race_clocked(runs, clocks, args.repeats)
    share, low, high = bare_share(results)
    remark = f"Share of the bare forward and backward passes in our whole: {share:.1%} ({low:.1%} to {high:.1%})."
    return {"results": results, "seconds by phase": phases, "remarks": [remark]}
