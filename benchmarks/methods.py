"""What each RL method costs: the real trainer's rollout and updates next to the bare passes."""

from __future__ import annotations

import gc
import tempfile
from pathlib import Path
from typing import Any

import torch

from benchmarks.clock import Clock
from benchmarks.rl_steps import Work, bare_rl, rl_trainer, train_rl
from benchmarks.steps import bare_share, race_clocked
from d1.rl.methods import METHODS


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
    trainer = rl_trainer(args, folder, clocks["ours"], method=name, **changes)
    last: list[Work] = []

    def ours() -> None:
        last[:] = [train_rl(trainer, "ours", clocks["ours"])]

    runs = {"ours": ours, "bare": lambda: bare_rl(trainer, last[0], clocks["bare"])}
    gc.collect()
    gc.freeze()  # each `train()` begins with a collection of all libraries' objects; a real run begins once
    results, _ = race_clocked(runs, clocks, args.repeats)
    gc.unfreeze()
    kind = "wall_seconds" if torch.cuda.is_available() else "cpu_seconds"
    forward, backward = passes_made(last[0])
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
