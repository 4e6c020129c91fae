"""Which predictions of a step are kept first (called remasking), and how many: by the schedule, or by a rule.

A new order or rule is a function, in any module, and an entry in its table: `REMASKING["mine"] = Order(f)`,
`RULES["mine"] = Rule(f, level)`. This module imports no torch.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from heapq import heapify, heapreplace
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from torch import Tensor


def split_evenly(total: int, parts: int) -> list[int]:
    """Split `total` into `parts` sizes that differ by at most one, the larger ones first; the sum is `total`."""
    size, remainder = divmod(total, parts)
    return [size + (part < remainder) for part in range(parts)]


def reveal_schedule(gen_length: int, block_length: int, steps: int) -> list[list[int]]:
    """Tokens revealed in each step of each block: one list per block, whose sum is the length of the block.

    Raises:
        ValueError: there are fewer steps than blocks, or more steps than tokens.
    """
    blocks = -(-gen_length // block_length)
    if not blocks <= steps <= gen_length:
        raise ValueError(
            f"{gen_length} tokens in {blocks} blocks need between {blocks} and {gen_length} steps, got {steps}"
        )
    sizes, steps_per_block = split_evenly(gen_length, blocks), split_evenly(steps, blocks)
    return [split_evenly(size, block_steps) for size, block_steps in zip(sizes, steps_per_block, strict=True)]


def block_schedule(sizes: Sequence[int], steps: int) -> list[list[int]]:
    """Tokens revealed in each step of each block, for blocks of these sizes: one step each, then each further one for
    the block with the most tokens per step so far. The total can exceed `steps` by one, if a prompt ends in a block."""
    steps_per_block = [1] * len(sizes)
    slowest: list[tuple[float, int]] = [(-size, block) for block, size in enumerate(sizes)]  # with the most per step
    heapify(slowest)
    for _ in range(steps - len(sizes)):
        block = slowest[0][1]
        steps_per_block[block] += 1
        heapreplace(slowest, (-sizes[block] / steps_per_block[block], block))
    return [split_evenly(size, block_steps) for size, block_steps in zip(sizes, steps_per_block, strict=True)]


def rest_of_schedule(block: Sequence[int], done: int, hidden: int, has_rule: bool) -> list[int]:
    """Tokens revealed in each further step of a block that still hides `hidden` tokens after `done` of its steps.

    `block` is the schedule of the whole block. Without a rule, the tokens are spread over the steps that are left; with
    one, which can be ahead of the schedule, each step leaves at most as many tokens as the schedule does.
    """
    left = max(len(block) - done, 1)
    if not has_rule:
        return split_evenly(hidden, min(left, hidden))
    schedule, before = [], hidden
    for step in range(1, left + 1):
        after = min(sum(block[done + step :]), hidden) if step < left else 0  # tokens hidden after this step
        schedule.append(before - after)
        before = after
    return schedule


def threshold(logps: Tensor, entropies: Tensor, level: float) -> Tensor:
    """All tokens whose probability exceeds `level` (Fast-dLLM, arXiv 2505.22618, section 3.3)."""
    return (logps.exp() > level).sum(-1)


def factor(logps: Tensor, entropies: Tensor, level: float) -> Tensor:
    """The largest n with (n + 1)(1 - c_n) < `level`; c_n is the n-th highest probability (Fast-dLLM, section 3.3)."""
    n = logps.new_ones(logps.shape[-1]).long().cumsum(-1)
    return ((n + 1) * -logps.expm1() < level).sum(-1)


def entropy_bound(logps: Tensor, entropies: Tensor, level: float) -> Tensor:
    """The largest n for which the entropies of the n most confident tokens, without the largest of them, sum to at most
    `level` nats. This sum bounds the error of revealing them together (EB-Sampler, arXiv 2505.24857, section 4)."""
    return (entropies.cumsum(-1) - entropies.cummax(-1).values <= level).sum(-1)


def risk_budget(logps: Tensor, entropies: Tensor, level: float) -> Tensor:
    """The largest n whose tokens all have a probability p above `level`, and whose risks 1 - p sum to at most
    1 - `level` (SLIM-RL, laolaorkkkkk/SLIM-RL@0c4960b, scheduler.py of its engine)."""
    certain = logps.exp() > level
    within_budget = -logps.expm1().cumsum(-1) <= 1 - level
    return (certain & within_budget).sum(-1)


@dataclass(frozen=True)
class Rule:
    """An entry of the table."""

    # Log-probabilities (rows, n), the most confident first, entropies there, level -> (rows,) how many are revealed
    count: Callable[[Tensor, Tensor, float], Tensor]
    level: float  # the default level
    plain_entropies: bool = False  # entropies computed in a slower way; only preserves old results


RULES: dict[str, Rule] = {
    "threshold": Rule(threshold, 0.9),
    "factor": Rule(factor, 1.0),
    "entropy": Rule(entropy_bound, 0.1, plain_entropies=True),
    "risk_budget": Rule(risk_budget, 0.9),
}


@dataclass(frozen=True)
class Order:
    """An entry of the table."""

    # Log-probabilities and entropies (rows, n) of the predictions, from left to right, a function that draws uniform
    # numbers (rows, n) -> scores (rows, n). The predictions with the highest scores are kept.
    scores: Callable[[Tensor, Tensor, Callable[[], Tensor]], Tensor]
    draws: bool = False  # whether uniform numbers are drawn
    by_confidence: bool = False  # whether the scores are the log-probabilities themselves, as reveal rules need


REMASKING: dict[str, Order] = {
    # The most likely predictions, or positions in random order (LLaDA, arXiv 2502.09992, section 2.4)
    "low_confidence": Order(lambda logps, entropies, uniform: logps, by_confidence=True),
    "random": Order(lambda logps, entropies, uniform: uniform(), draws=True),
    # From left to right within a block (JustGRPO for blocks, NVIDIA-NeMo/RL research/just_grpo)
    "leftmost": Order(lambda logps, entropies, uniform: -logps.new_ones(logps.shape).cumsum(-1)),
    # The predictions with the lowest entropy (Dream, DiffuCoder, arXiv 2506.20639)
    "entropy": Order(lambda logps, entropies, uniform: -entropies),
}
