"""The targets and divergences of `METHODS`, on the places of a micro-batch, n in all.

A target is read from the logits of the teacher, without gradients, a divergence from those of the student. The loss of
an optimizer step is a mean over all of its micro-batches and processes: `totals` are the counts that it divides by.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from d1.models.head import token_entropies, token_logps

Logged = dict[str, Tensor]  # values, whose mean is logged


@dataclass(frozen=True)
class Compared:
    """The places of a micro-batch.

    Attributes:
        row, state: (n,) of each place.
        ids: (n,) own tokens.
        weights: (n,) as in `States`.
        picks: (n,) of each place's state, as in `States`.
        rows: of the micro-batch.
        target: what the target read, (n, ...) each.
    """

    row: Tensor
    state: Tensor
    ids: Tensor
    weights: Tensor
    picks: Tensor
    rows: int
    target: tuple[Tensor, ...] = ()


# --- Targets: (settings, logits, own ids) -> columns -----------------------------------------------------------------


def own(settings: Any, logits: Tensor, ids: Tensor) -> tuple[Tensor, ...]:
    """Whether the own token is the most likely one."""
    return (logits.argmax(-1) == ids,)


def rival(settings: Any, logits: Tensor, ids: Tensor) -> tuple[Tensor, ...]:
    """The own token's log-probability, the most likely token, and its log-probability."""
    best = logits.argmax(-1)
    return token_logps(logits, ids), best, token_logps(logits, best)


def best(settings: Any, logits: Tensor, ids: Tensor) -> tuple[Tensor, ...]:
    """The largest logit; the most likely tokens (n, k) and their log-probabilities among themselves."""
    top, tokens = logits.topk(min(settings.teacher_top_k, logits.shape[-1]), dim=-1)
    return top[:, 0], tokens, top.log_softmax(-1)


Target = Callable[[Any, Tensor, Tensor], tuple[Tensor, ...]]
TARGETS: dict[str, Target] = {"own": own, "rival": rival, "best": best}


# --- Divergences ------------------------------------------------------------------------------------------------------


def read_certainty(settings: Any, logits: Tensor, ids: Tensor, right: Tensor) -> tuple[Tensor, ...]:
    return token_logps(logits, ids), token_entropies(logits / settings.entropy_temperature)


def count_certainty(seen: Compared) -> Tensor:
    """(2, states) places, and those where the own token is the most likely one."""
    (right,) = seen.target
    return torch.stack(
        [torch.bincount(seen.state, weights, minlength=2) for weights in (torch.ones_like(right), right)]
    )


def certainty(seen: Compared, read: tuple[Tensor, ...], totals: Tensor, rows: Any, settings: Any) -> Any:
    """dParallel (section 4): for each of the two states, the mean cross-entropy of the own tokens plus the weighted
    mean entropy, at a temperature below 1, of places where the own token is already the most likely one."""
    (logps, entropies), (right,) = read, seen.target
    each, every = (1 / totals.clamp(min=1)).to(logps.dtype)[:, seen.state]
    sharp = entropies * right
    loss = -(logps * each).sum() + settings.entropy_weight * (sharp * every).sum()
    return loss, {"logps/own": logps, "right": right, "entropy": entropies}


def read_discriminator(
    settings: Any, logits: Tensor, ids: Tensor, own: Tensor, rivals: Tensor, of_rivals: Tensor
) -> tuple[Tensor, ...]:
    return token_logps(logits, ids), token_logps(logits, rivals)


def count_nothing(seen: Compared) -> Tensor:
    """Only the rows of the step count."""
    return torch.zeros((), device=seen.ids.device)


def by_row(values: Tensor, seen: Compared) -> Tensor:
    """(rows,) means over each row's places; 0 for rows without one."""
    zeros = values.new_zeros(seen.rows)
    count = zeros.index_add(0, seen.row, torch.ones_like(values))
    return zeros.index_add(0, seen.row, values) / count.clamp(min=1)


def discriminator(seen: Compared, read: tuple[Tensor, ...], totals: Tensor, rows: Any, settings: Any) -> Any:
    """T3D (direct discriminative optimization): with d the mean, over a row's places, of the log-probability less the
    reference's, -log sigmoid(beta d) for the own tokens and -w log(1 - sigmoid(beta d)) for the reference's most likely
    ones; plus the cross-entropy by trace level."""
    (logps, of_rivals), (reference, _, rival_reference) = read, seen.target
    ratio, other = by_row(logps - reference, seen), by_row(of_rivals - rival_reference, seen)
    here = by_row(torch.ones_like(logps), seen)  # 1 for rows with places, else 0
    losses = -F.logsigmoid(settings.beta * ratio) - settings.rival_weight * F.logsigmoid(-settings.beta * other)
    path = -(seen.weights * logps).sum()
    loss = ((losses * here).sum() + settings.path_weight * path) / rows
    return loss, {"logps/own": logps, "logps/rival": of_rivals, "ratios/own": ratio, "ratios/rival": other}


def read_reverse_kl(
    settings: Any, logits: Tensor, ids: Tensor, largest: Tensor, tokens: Tensor, teacher: Tensor
) -> tuple[Tensor, ...]:
    """Terms (n, k) of the divergence of the student from the teacher, both among the teacher's tokens."""
    student = logits.gather(-1, tokens).log_softmax(-1)
    return (student.exp() * (student - teacher),)


def reverse_kl(seen: Compared, read: tuple[Tensor, ...], totals: Tensor, rows: Any, settings: Any) -> Any:
    """d-OPSD: at the places of a state where the teacher's largest logit is highest, as many as the sampler revealed
    there, KL(student | teacher) among the teacher's most likely tokens, each term clipped from above; the mean over a
    row's states, and over all rows of the step, also those that are not trained on."""
    (terms,), (largest, _, _) = read, seen.target
    order = largest.argsort(descending=True, stable=True)
    group = seen.row * (int(seen.state.max()) + 1 if len(seen.state) else 1) + seen.state
    order = order[group[order].argsort(stable=True)]  # state after state, in each the highest first
    place = torch.arange(len(order), device=order.device)
    firsts = torch.searchsorted(group[order].contiguous(), group[order].contiguous())
    ranks = torch.empty_like(place).scatter(0, order, place - firsts)
    counts = seen.weights * (ranks < seen.picks)
    found = terms.clamp(max=settings.clip).sum(-1)
    return (counts * found).sum() / rows, {"kl": terms.sum(-1)[counts > 0], "clipped": (terms > settings.clip).float()}


@dataclass(frozen=True)
class Divergence:
    """A row of the table.

    Attributes:
        read: (settings, logits, own ids, *target's columns) -> what the loss needs of each place, differentiable.
        totals: (places) -> counts, which are summed over the optimizer step before the loss sees them.
        loss: (places, what was read, totals, rows of the step, settings) -> the micro-batch's part of the loss of the
            step, and what is logged. The parts sum to the loss.
    """

    read: Callable[..., tuple[Tensor, ...]]
    totals: Callable[[Compared], Tensor]
    loss: Callable[..., tuple[Tensor, Logged]]


DIVERGENCES = {
    "certainty": Divergence(read_certainty, count_certainty, certainty),
    "discriminator": Divergence(read_discriminator, count_nothing, discriminator),
    "reverse_kl": Divergence(read_reverse_kl, count_nothing, reverse_kl),
}
