"""What each RL method costs: the real trainer's rollout and updates beside the bare passes; an update by its views."""

from __future__ import annotations

import gc
import tempfile
from pathlib import Path
from typing import Any

import torch

from benchmarks.clock import Clock
from benchmarks.machine import peak_bytes, race, seconds
from benchmarks.random_models import MASK, random_model, random_prompts
from benchmarks.rl_steps import Work, bare_rl, rl_trainer, train_rl
from benchmarks.steps import bare_share, race_clocked
from d1.masking import keyed_generator
from d1.models.head import body_and_head
from d1.rl.methods import METHODS
from d1.scoring import ESTIMATORS, SampledRows, ViewSettings, score
from d1.scoring.rollouts import randomness

VIEWS = (1, 4, 16, 64)


def plain_passes(model: Any, rows: int, prompt: int, length: int) -> dict[str, Any]:
    """A forward pass of rows of random tokens with the canvas' logits, and one with its backward pass."""
    ids, _ = random_prompts(model, rows, prompt + length)
    body, head = body_and_head(model)

    def forward() -> torch.Tensor:
        return head(body(ids, None)[:, prompt:])

    def both() -> None:
        found = forward()
        found.backward(torch.ones_like(found))
        model.zero_grad()

    return {"forward": torch.no_grad()(forward), "forward and backward": both}


def passes_made(work: Work) -> tuple[float, float]:
    """Forward and backward passes a row: forward those of sampling, scoring and updates, computed again or not."""
    [sampled] = work.rollouts
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
    plain = race(plain_passes(trainer.model, args.rows, args.prompt, args.length), 2 * args.repeats, base="forward")
    kind = "wall_seconds" if torch.cuda.is_available() else "cpu_seconds"
    forward, backward = passes_made(last[0])
    share, low, high = bare_share(results)
    return {
        "updates": changes["num_iterations"],
        "forward passes a row": forward,
        "backward passes a row": backward,
        "seconds": results["ours"][kind],
        "in forward passes": results["ours"][kind] / plain["forward"][kind],
        "in forward and backward passes": results["ours"][kind] / plain["forward and backward"][kind],
        "bare share, %": 100 * share,
        "lowest": 100 * low,
        "highest": 100 * high,
    }


def update_by_views(args: Any) -> dict[str, dict[str, float]]:
    """One update's log-probs and gradients under the elbo's views: seconds, and peak bytes beyond the weights."""
    model = random_model(args.size)
    ids, mask = random_prompts(model, args.rows, args.prompt)
    canvas, ones = random_prompts(model, args.rows, args.length)
    zeros = torch.zeros_like(canvas)
    sampled = SampledRows(ids, mask, mask.bool(), canvas, ones.bool(), zeros, zeros.float(), zeros.float())
    rows = [keyed_generator(0, row) for row in range(args.rows)]
    [random] = randomness(rows, keyed_generator(1), 0, args.rows, 1)
    kind, found = 0 if torch.cuda.is_available() else 1, {}
    for count in VIEWS:
        views = ESTIMATORS["elbo"](sampled, random, ViewSettings(num_views=count, stratified=True))

        def update(views: Any = views) -> None:
            scores = score(model, ids, mask, canvas, views, mask_token_id=MASK, gen_length=args.length)
            scores.logps.sum().backward()
            model.zero_grad()

        peak = float(peak_bytes(update))  # also the warm-up
        taken = min(seconds(update)[kind] for _ in range(args.repeats))
        found[f"{count} view{'s' * (count > 1)}"] = {
            "seconds": taken,
            "seconds a view": taken / count,
            "peak bytes": peak,
        }
    return found


def race_methods(args: Any) -> dict[str, Any]:
    results = {}
    for name in METHODS:
        with tempfile.TemporaryDirectory() as folder:
            results[name] = race_method(name, args, Path(folder))
    return {"results": results, "an update by the elbo's views": update_by_views(args)}
