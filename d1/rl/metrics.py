"""Metrics of an update: ratios, the gap between the policy that sampled and the one that is trained, faulty rows."""

from __future__ import annotations

import resource
import sys
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from d1.rl.rows import LossInputs, known
from d1.rl.updates import Batch, fitted, mean_logps, where_scored


def prompt_masked(batch: Batch) -> float:
    """The share of prompt tokens that are hidden, over the views of all updates."""
    noise, prompt = batch["view_noise"], batch["prompt_mask"].bool()
    return (noise[..., : prompt.shape[1]].sum() / (prompt.sum() * noise.shape[1:3].numel())).item()


def largest_ratio(inputs: LossInputs, gather: Callable[[Tensor], Tensor]) -> float:
    """The largest ratio of new to old probabilities of a token, over all views that score it and all processes."""
    scored = (inputs.weights * inputs.mask.unsqueeze(1)) != 0
    ratios = (inputs.view_logps - known(inputs.view_old)).detach().exp().masked_fill(~scored, 0.0)
    return gather(ratios.max()).max().item()


def mean_entropy(inputs: LossInputs, entropies: Tensor | None, gather: Callable[[Tensor], Tensor]) -> float:
    """The policy's mean entropy in nats over scored tokens; `entropies` (rows, canvas) are already weighted."""
    assert entropies is not None
    sums = torch.stack([entropies.sum(), inputs.weights.sum()])
    total, weight = gather(sums).view(-1, 2).sum(0).tolist()
    return total / weight if weight else 0.0


def sampling_gap(
    sampled: Tensor, inputs: LossInputs, gather: Callable[[Tensor], Tensor], cap: float | None = None
) -> dict[str, float]:
    """The difference between the policy that sampled, with log-probs `sampled` (rows, canvas), and the one that is
    trained, before the first inner update.

    A token's log-prob is the mean over the views that score it. The mean difference estimates the KL between the two
    (Schulman's k1). For the exact sampler it is zero under replay, but not under d1's estimator, which scores each
    token alone. If there are sampling weights, their mean and the share of capped tokens are returned, too.
    """
    scored, logps = where_scored(inputs), mean_logps(inputs.logps.detach(), inputs)
    gap = (fitted(sampled, logps.shape[1]) - logps).masked_fill(~scored, 0.0)
    sums = {"sampling/logp_difference_mean": gap.sum(), "sampling/logp_difference_abs": gap.abs().sum()}
    if inputs.sampling_weights is not None and cap is not None:
        sums["sampling/weight_mean"] = (inputs.sampling_weights * scored).sum()
        sums["sampling/weight_capped"] = ((inputs.sampling_weights >= cap) & scored).sum()
    *totals, count = gather(torch.stack([*sums.values(), scored.sum()])).view(-1, len(sums) + 1).sum(0).tolist()
    largest = gather((-gap).masked_fill(~scored, -torch.inf).max().exp()).max().item()
    means = {name: total / max(count, 1) for name, total in zip(sums, totals, strict=True)}
    return means | {"sampling/ratio_max": largest}


def rows_to_blame(batch: Batch, logps: Tensor, decode: Callable[[Tensor], str]) -> list[dict[str, Any]]:
    """The rows with numbers that are not finite, of a loss that is not finite; all rows if only the sum overflowed."""
    bad = ~(torch.isfinite(logps).all(-1) & torch.isfinite(batch["advantages"]))

    def text(part: str, row: int) -> str:
        return decode(batch[f"{part}_ids"][row][batch[f"{part}_mask"][row].bool()])

    return [
        {
            "prompt": text("prompt", row),
            "completion": text("completion", row),
            "advantage": batch["advantages"][row].item(),
            "logps": logps[row].tolist(),
        }
        for row in (bad if bad.any() else torch.ones_like(bad)).nonzero().flatten().tolist()
    ]


def peak_memory_gb() -> float:
    """This process's peak memory so far in GiB: of its GPU if there is one, else resident memory."""
    if torch.cuda.is_available():
        return torch.cuda.max_memory_allocated() / 2**30
    kilobytes = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return kilobytes / (2**30 if sys.platform == "darwin" else 2**20)
