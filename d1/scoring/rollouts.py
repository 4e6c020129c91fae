"""What an estimator may know and use when it draws the views to score sampled completions in."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Generator, Tensor

from d1.masking import draw_masks


@dataclass(frozen=True)
class ViewSettings:
    """The settings of a run that estimators read; the defaults are d1's.

    Attributes:
        gen_length: tokens of the canvas.
        steps: forward passes of a rollout, at most.
        block_length: tokens per block of the sampler.
        p_mask_prompt: the probability to hide each maskable token of the prompt.
        num_views: Monte Carlo draws per row and update; None: one, and replay scores every step.
        antithetic, stratified: of `elbo.py`.
        segments, segment_steps, draw_steps, mean_step: of `replay.py`.
    """

    gen_length: int = 256
    steps: int = 128
    block_length: int = 32
    p_mask_prompt: float = 0.0
    num_views: int | None = None
    antithetic: bool = False
    stratified: bool = False
    segments: int | None = None
    segment_steps: int | None = None
    draw_steps: str = "uniform"
    mean_step: bool = False

    @property
    def draws(self) -> int:
        """Draws per row and update, of estimators that draw."""
        return self.num_views or 1


@dataclass(frozen=True)
class SampledRows:
    """Completions as a rollout left them, on their whole canvas: what stands behind a completion's end was sampled too.

    Attributes:
        prompt_ids, attention_mask: (rows, prompt), padded on the left.
        maskable: (rows, prompt) bool, the prompt tokens that may be hidden: never padding.
        completion_ids: (rows, gen_length).
        scored: (rows, gen_length) bool, the tokens that count: up to and including the first EOS.
        reveal_steps: (rows, gen_length), the row's forward pass, from 0, that revealed each token; -1 where none did.
        logps, entropies: (rows, gen_length) fp32, of the sampler's own distribution in that pass.
        blocks: (rows, gen_length), of a block-causal model the number of each token's block; None for others.
        write_ids, write_steps, write_entropies: (rows, gen_length, writes), of a sampler that edits all that it wrote
            (`d1.sampling.loop.Writes`), the last of which is in the tensors above; None for others.
    """

    prompt_ids: Tensor
    attention_mask: Tensor
    maskable: Tensor
    completion_ids: Tensor
    scored: Tensor
    reveal_steps: Tensor
    logps: Tensor
    entropies: Tensor
    blocks: Tensor | None = None
    write_ids: Tensor | None = None
    write_steps: Tensor | None = None
    write_entropies: Tensor | None = None

    @property
    def gen_length(self) -> int:
        return self.completion_ids.shape[1]

    def to(self, device: torch.device | str) -> SampledRows:
        """The same rows on a device."""
        there: dict[str, Any] = {
            name: value if value is None else value.to(device) for name, value in vars(self).items()
        }
        return SampledRows(**there)


def blocks_of(attention_mask: Tensor, gen_length: int, size: int | None) -> Tensor | None:
    """`SampledRows.blocks` behind prompts (rows, prompt), for blocks of `size` tokens."""
    if size is None:
        return None
    places = torch.arange(gen_length, device=attention_mask.device)
    return (attention_mask.long().sum(-1, keepdim=True) + places) // size


def within_blocks(order: Tensor, blocks: Tensor | None) -> Tensor:
    """The numbers `order` (rows, gen_length) of steps, counted from the first of each token's own block; -1 stays.

    One view of a block-causal model holds a step of every block (`d1/scoring/views.py`).
    """
    if blocks is None:
        return order
    blocks = blocks - blocks[:, :1]
    counted = order.masked_fill(order < 0, torch.iinfo(order.dtype).max)
    firsts = torch.full_like(order, torch.iinfo(order.dtype).max).scatter_reduce(1, blocks, counted, "amin")
    return torch.where(order < 0, order, order - firsts.gather(1, blocks))


@dataclass(frozen=True)
class Randomness:
    """The random numbers of a draw.

    Attributes:
        rows: one generator a row, so that a row's views depend neither on its batch nor on the number of processes.
        shared: in the same state on all processes; always draw from it for all `total_rows`, not for those at hand.
        first_row: which row of the rollout, over all processes, the first row at hand is.
        total_rows: rows of the rollout, over all processes.
    """

    rows: Sequence[Generator]
    shared: Generator
    first_row: int
    total_rows: int

    def evenly_spread(self, draws: int) -> Tensor:
        """(rows, draws) in [0, 1), fp64, each uniform, and all of the rollout's together spread evenly: `strata`."""
        order = torch.randperm(self.total_rows * draws, generator=self.shared)
        # In fp32 a stratum far from 0 would hold few numbers, and its last would round up into the next.
        numbers = strata(order, torch.rand((), generator=self.shared, dtype=torch.float64))
        return self.own(numbers.view(self.total_rows, draws))

    def rotated(self, draws: int) -> Tensor:
        """(rows, draws) in [0, 1), each uniform, and all of the rollout's together equally far apart: `rotation`."""
        return self.own(rotation(self.total_rows, draws, torch.rand((), generator=self.shared)))

    def uniform(self, draws: int) -> Tensor:
        """(rows, draws) in [0, 1), independent, each row's from its own generator."""
        return torch.stack([torch.rand(draws, generator=generator) for generator in self.rows])

    def own(self, of_all_rows: Tensor) -> Tensor:
        """The part of `of_all_rows` that belongs to the rows at hand."""
        return of_all_rows[self.first_row : self.first_row + len(self.rows)]


def strata(order: Tensor, u: Tensor) -> Tensor:
    """(S,) one number in each of S equal parts of [0, 1), in the order of a permutation `order`, all as far into their
    part as `u` in [0, 1) says (AGRPO's low-discrepancy draws, arXiv 2510.04019)."""
    return (order + u) / len(order)


def rotation(rows: int, draws: int, u: Tensor) -> Tensor:
    """(rows, draws): draw v of row i is (v + i / rows) / draws + u, modulo 1. A row's draws are equally far apart
    (BGPO), and so are those of all rows together (LLaDA, ESPO)."""
    starts = torch.arange(rows, dtype=u.dtype).unsqueeze(1) / rows
    return ((torch.arange(draws) + starts) / draws + u) % 1


def prompt_noise(sampled: SampledRows, random: Randomness, p: float, views: int) -> Tensor:
    """(rows, views, prompt) bool: each view hides each maskable token of the prompt with probability `p`."""
    return torch.stack([draw_masks(sampled.maskable, p, random.rows) for _ in range(views)], dim=1)
