"""The record of a rollout as columns of a batch, and what sampling took."""

from __future__ import annotations

import time
from typing import Any

import torch
from torch import Tensor

from d1.rl.updates import Batch
from d1.sampling import Rollout


def recorded(sampled: Rollout) -> tuple[Batch, dict[str, float]]:
    """The columns (rows, canvas) of a rollout, with editing also those of all writes, (rows, canvas, writes); and what
    it took of each row, on average. Waits for the device."""
    counts = [sampled.passes, sampled.forward_tokens, sampled.edits, sampled.most_writes]
    passes, fed, edits, most = torch.stack(counts).cpu()
    costs = {"sampling/forward_passes": passes, "sampling/forward_tokens": fed}
    record = {"canvas_ids": sampled.ids[:, -sampled.logps.shape[1] :], "reveal_steps": sampled.reveal_steps}
    record |= {"rollout_logps": sampled.logps, "rollout_entropies": sampled.entropies}
    if sampled.writes is not None:
        record |= {f"write_{name}": of[..., : int(most.max())] for name, of in sampled.writes._asdict().items()}
        costs["sampling/edits"] = edits
    return record, {name: of.float().mean().item() for name, of in costs.items()}


def log_rollout(trainer: Any, started: float, tokens: int, costs: dict[str, float]) -> None:
    """Logs what a rollout of so many tokens per process took since `started`, and its `costs`."""
    seconds = time.perf_counter() - started
    speed = tokens * trainer.accelerator.num_processes / seconds
    for name, value in {"seconds/rollout": seconds, "rollout_tokens_per_second": speed, **costs}.items():
        trainer.log_metric(name, value)


def view_logps_as_sampled(batch: Batch) -> Tensor:
    """(rows, mu, views, canvas) the sampler's log-prob of each token that a view scores, 0 elsewhere: old log-probs
    of an estimator that scores tokens in the states in which they were revealed."""
    return torch.where(batch["view_weights"] != 0, batch["rollout_logps"][:, None, None], 0.0)


def sampled_logps(batch: Batch, replayed: bool) -> Tensor:
    """(rows, canvas) the sampler's log-prob of each token. For a token that was written several times: the mean over
    these writes if they are `replayed`, else the last one."""
    if not replayed or "write_logps" not in batch:
        return batch["rollout_logps"]
    return batch["write_logps"].sum(-1) / (batch["write_steps"] >= 0).sum(-1).clamp(min=1)
