"""A learned order: a head that scores hidden places, sampling by these scores, and training by their exact probability.

The canvas is one block. In each step every hidden place gets a score, and the places with the highest scores are
revealed, as many as the schedule says. With noise, Gumbel noise times `noise` is added to the scores: the places are
drawn one after the other in proportion to exp(score / noise), without replacement (Plackett-Luce), so the probability
of the drawn sequence is known exactly.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Generator, Tensor, nn

from d1.models.head import body_and_head, most_likely
from d1.sampling.predict import draw_ids, gumbel, uniform
from d1.sampling.reveal import spread

WIDTH = 32  # of the head


class Places(NamedTuple):
    """What an order sees of the n hidden places of a step: (rows, n) each, and states (rows, n, hidden)."""

    logps: Tensor  # the largest log-probability there, without the mask token
    entropies: Tensor  # nats
    left: Tensor  # the share of the canvas that is still hidden
    states: Tensor  # last hidden states
    drawn: Tensor  # the log-probability of the token that was drawn; at temperature 0, `logps`


Scores = Callable[[Places], Tensor]
RULES: dict[str, Scores] = {
    "confidence": lambda places: places.drawn,
    "entropy": lambda places: -places.entropies,
    "random": lambda places: torch.zeros_like(places.drawn),  # with noise
}


class Head(nn.Module):
    """Scores of places: the largest log-probability, plus a function of all features that is 0 before training."""

    def __init__(self, hidden: int, seed: int) -> None:
        super().__init__()
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(seed)
            self.first = nn.Linear(hidden + 3, WIDTH)
            self.last = nn.Linear(WIDTH, 1)
        nn.init.zeros_(self.last.weight)
        nn.init.zeros_(self.last.bias)

    def forward(self, places: Places) -> Tensor:
        states = nn.functional.layer_norm(places.states, places.states.shape[-1:])
        numbers = torch.stack([places.logps.exp(), places.entropies, places.left], -1)
        features = torch.cat([numbers, states], -1)
        return places.logps + self.last(nn.functional.silu(self.first(features))).squeeze(-1)


class Step(NamedTuple):
    """A step of a rollout: the text before it, its hidden positions, and what it revealed, in the order of the draw."""

    ids: Tensor  # (rows, length)
    positions: Tensor  # (rows, n)
    places: Places
    order: Tensor  # (rows, k) indices of `positions`
    tokens: Tensor  # (rows, k)


def places_of(logits: Tensor, states: Tensor, mask: int, canvas: int) -> Places:
    """The places with these logits (rows, n, vocab), differentiably; `drawn` is `logps`."""
    own = logits.log_softmax(-1)
    best = own.index_fill(-1, torch.tensor([mask]), -math.inf).amax(-1)
    left = torch.full_like(best, logits.shape[1] / canvas)
    return Places(best, -(own.exp() * own).sum(-1), left, states, best)


@torch.no_grad()
def fill(
    model: Any,
    scores: Scores,
    prompts: Tensor,
    length: int,
    steps: int,
    mask: int,
    *,
    temperature: float = 0.0,
    noise: float = 0.0,
    generator: Generator | None = None,
) -> tuple[Tensor, list[Step]]:
    """Completions (rows, length) of prompts (rows, prompt) without padding, and the steps that made them; `mask` is the
    id of the mask token. At temperature 0, tokens are the most likely ones."""
    (body, run_head), taken = body_and_head(model), []
    ids = torch.cat([prompts, prompts.new_full((len(prompts), length), mask)], 1)
    for due in spread(length, steps):
        positions = (ids == mask).nonzero()[:, 1].view(len(ids), -1)
        states = body(ids, None, positions)
        logits = run_head(states)
        if temperature:
            places = places_of(logits, states, mask, length)
            tokens = draw_ids(logits.index_fill(-1, torch.tensor([mask]), -math.inf), temperature, generator)
            own = logits.gather(-1, tokens.unsqueeze(-1)).squeeze(-1) - logits.logsumexp(-1)
            places = places._replace(drawn=own)
        else:
            tokens, own, entropies = most_likely(logits, mask)
            places = Places(own, entropies, torch.full_like(own, positions.shape[1] / length), states, own)
        ranked = scores(places)
        if noise:
            ranked = ranked + noise * gumbel(uniform(ranked.shape, generator, ranked))
        order = ranked.argsort(dim=-1, descending=True, stable=True)[:, :due]  # ties: left first
        chosen = tokens.gather(1, order)
        taken.append(Step(ids.clone(), positions, places, order, chosen))
        ids.scatter_(1, positions.gather(1, order), chosen)
    return ids[:, prompts.shape[1] :], taken


def order_logps(scores: Tensor, order: Tensor, noise: float) -> Tensor:
    """log P (rows,) that k < n of the places with `scores` (rows, n) are drawn in this `order` (rows, k)."""
    drawn = scores.gather(1, order) / noise
    rest = (scores / noise).scatter(1, order, -math.inf).logsumexp(1, keepdim=True)
    left = torch.cat([drawn, rest], 1).flip(1).logcumsumexp(1).flip(1)  # before each of the draws
    return (drawn - left[:, :-1]).sum(1)


def token_logps(logits: Tensor, step: Step, temperature: float, mask: int) -> Tensor:
    """log P (rows,) of the tokens that a step revealed, as they were drawn from `logits` (rows, n, vocab)."""
    logps = (logits.index_fill(-1, torch.tensor([mask]), -math.inf) / temperature).log_softmax(-1)
    at = step.order.unsqueeze(-1).expand(-1, -1, logps.shape[-1])
    return logps.gather(1, at).gather(-1, step.tokens.unsqueeze(-1)).squeeze(-1).sum(1)


@dataclass(frozen=True)
class Training:
    """How an arm is trained.

    Attributes:
        arm: "order": the head alone, by the probability of the places; tokens are the most likely ones. "joint": head
            and model, by that of places and tokens. "tokens": the model alone, by that of tokens, which are revealed
            by confidence.
        steps: forward passes per completion.
        head_rate, rate: learning rates of head and model, which fall linearly to 0.
    """

    arm: str
    length: int
    steps: int
    mask: int
    updates: int
    head_rate: float
    rate: float = 0.0
    group: int = 8
    prompts: int = 8
    noise: float = 0.1
    temperature: float = 0.9

    @property
    def learns_places(self) -> bool:
        return self.arm != "tokens"

    @property
    def learns_tokens(self) -> bool:
        return self.arm != "order"


def losses(model: Any, head: Head, steps: Sequence[Step], advantages: Tensor, s: Training) -> Iterator[Tensor]:
    """REINFORCE: for each step, minus the mean over rows of advantage x log P; the sum has the gradient of the mean
    reward, up to its sign. A model that learns is run again in the state of each step. The order of the places that a
    step reveals counts, unless it reveals all that are left."""
    body, run_head = body_and_head(model)
    for step in steps:
        places, total = step.places, torch.zeros(len(advantages))
        if s.learns_tokens:
            states = body(step.ids, None, step.positions)
            logits = run_head(states)
            places = places_of(logits, states, s.mask, s.length)
            total = total + token_logps(logits, step, s.temperature, s.mask)
        if s.learns_places and step.order.shape[1] < step.positions.shape[1]:  # else all places are revealed
            total = total + order_logps(head(places), step.order, s.noise)
        if total.requires_grad:
            yield -(advantages * total).mean()


def train(
    model: Any,
    head: Head,
    batches: Iterator[tuple[Tensor, Callable[[Tensor], Tensor]]],
    s: Training,
    generator: Generator,
) -> list[float]:
    """Trains in place; returns the mean reward of each rollout.

    Args:
        batches: prompts (rows, prompt), the rows of a group one after the other, and what gives the rewards (rows,) of
            their completions (rows, length).
    """
    both = ((head, s.head_rate, s.learns_places), (model, s.rate, s.learns_tokens))
    learning = [([*module.parameters()], rate) for module, rate, learns in both if learns]
    groups = [{"params": weights, "lr": rate} for weights, rate in learning]
    optimizer = torch.optim.AdamW(groups, betas=(0.9, 0.99), weight_decay=0.0)
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda update: 1 - update / s.updates)
    how: dict[str, Any] = {"temperature": s.temperature * s.learns_tokens, "noise": s.noise * s.learns_places}
    scores, curve = head if s.learns_places else RULES["confidence"], []
    for _, (prompts, reward) in zip(range(s.updates), batches, strict=False):
        ids, taken = fill(model, scores, prompts, s.length, s.steps, s.mask, generator=generator, **how)
        rewards = reward(ids)
        grouped = rewards.view(-1, s.group)
        advantages = (grouped - grouped.mean(1, keepdim=True)).flatten()
        optimizer.zero_grad()
        for loss in losses(model, head, taken, advantages, s):
            loss.backward()
        for weights, _ in learning:
            nn.utils.clip_grad_norm_(weights, 1.0)
        optimizer.step()
        schedule.step()
        curve.append(round(rewards.mean().item(), 4))
    return curve
