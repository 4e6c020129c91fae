"""What an estimator gets to draw the views of sampled completions: settings, rows and random numbers."""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Generator, Tensor

from d1.masking import draw_masks
from d1.models.attention import has_causal_context
from d1.models.kinds import block_size
from d1.sampling.settings import SamplingSettings


@dataclass(frozen=True)
class ViewSettings:
    """The settings of a run that estimators read. Defaults are d1's, except that d1 hides 15% of the prompt's tokens.

    Attributes:
        gen_length: tokens of the canvas.
        steps: forward passes per completion (maximum).
        block_length: tokens per block of the sampler.
        p_mask_prompt: the probability to hide each maskable token of the prompt.
        num_views: Monte Carlo draws per row and update; None is one draw, or every step for replay.
        antithetic, stratified: see `elbo.py`.
        segments: into how many segments the steps of a canvas are cut (`d1/rl/methods/d2.py`); None: one per step.
        segment_steps, draw_steps, mean_step: see `replay.py`.
        branches: of a tree of rollouts, the children of a node of each level; None: rollouts are no trees.
        sampling: all settings of the sampler (`sampler`).
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
    branches: Sequence[int] | None = None
    sampling: SamplingSettings | None = None

    @property
    def sampler(self) -> SamplingSettings:
        """`sampling`; ValueError if it is not there."""
        if self.sampling is None:
            raise ValueError("this estimator needs ViewSettings(sampling=...): how the rows were sampled")
        return self.sampling

    @property
    def draws(self) -> int:
        """Draws per row and update, for estimators that draw."""
        return self.num_views or 1

    @property
    def paired_draws(self) -> int:
        """Views of these draws and, if antithetic, of their opposites."""
        return self.draws * (2 if self.antithetic else 1)


@dataclass(frozen=True)
class SampledRows:
    """Completions as a rollout left them, on the whole canvas: what follows a completion's end was sampled, too, or
    filled by the EOS stop.

    Attributes:
        prompt_ids, attention_mask: (rows, prompt), padded on the left.
        maskable: (rows, prompt) bool, the prompt tokens that may be hidden: never padding.
        canvas_ids: (rows, gen_length), the ids of the whole canvas.
        scored: (rows, gen_length) bool, the tokens that count in the loss: by default up to and with the first EOS.
        reveal_steps: (rows, gen_length), the row's forward pass, from 0, that revealed each token; -1 if none did.
        logps, entropies: (rows, gen_length) fp32, of the sampler's own distribution in that pass.
        blocks: (rows, gen_length), the number of each token's block in a block-causal model; None for other models.
        write_ids, write_steps, write_entropies, write_logps: (rows, gen_length, writes), of a sampler that edits all
            that it wrote (`d1.sampling.record.Writes`), the last of which is in the tensors above; None for others.
        is_end: (rows, gen_length) bool, the tokens that end a text, such as an EOS; None: the rollout is no tree.
        start_steps: (rows,), as in `Rollout`: tokens with an earlier step belong to another row.
    """

    prompt_ids: Tensor
    attention_mask: Tensor
    maskable: Tensor
    canvas_ids: Tensor
    scored: Tensor
    reveal_steps: Tensor
    logps: Tensor
    entropies: Tensor
    blocks: Tensor | None = None
    write_ids: Tensor | None = None
    write_steps: Tensor | None = None
    write_entropies: Tensor | None = None
    write_logps: Tensor | None = None
    is_end: Tensor | None = None
    start_steps: Tensor | None = None

    @property
    def block_numbers(self) -> Tensor:
        """(rows, gen_length), `blocks` numbered from 0; all 0 without blocks."""
        if self.blocks is None:
            return torch.zeros_like(self.canvas_ids)
        return self.blocks - self.blocks[:, :1]

    @property
    def gen_length(self) -> int:
        return self.canvas_ids.shape[1]

    @property
    def completion_ids(self) -> Tensor:
        """Deprecated: the old name of `canvas_ids`."""
        warnings.warn("SampledRows.completion_ids is now canvas_ids", FutureWarning, stacklevel=2)
        return self.canvas_ids

    def to(self, device: torch.device | str) -> SampledRows:
        """The same rows on a device."""
        moved: dict[str, Any] = {}
        for name, value in vars(self).items():
            moved[name] = None if value is None else value.to(device)
        return SampledRows(**moved)


class CanvasBlocks(NamedTuple):
    """Where the blocks of a model lie on a canvas."""

    size: int | None = None  # tokens per block; None: there are no blocks
    # With a causal context, the first block begins with the canvas; `causal_first`: the sampler took the first token of
    # each block from the clean text before it, and so is it scored.
    causal_context: bool = False
    causal_first: bool = False

    @classmethod
    def from_config(cls, config: Any, block_length: int | None = None, first_token: str | None = None) -> CanvasBlocks:
        """Those of a model with this config, as sampled with these settings; None: with the defaults."""
        if not has_causal_context(config):
            return cls(block_size(config))
        return cls(block_length or block_size(config), True, first_token != "masked")


def canvas_blocks(
    attention_mask: Tensor, gen_length: int, size: int | None, after_prompt: bool = False
) -> Tensor | None:
    """`SampledRows.blocks` for prompts (rows, prompt) and blocks of `size` tokens, counted from the start of the text
    or `after_prompt`."""
    if size is None:
        return None
    positions = torch.arange(gen_length, device=attention_mask.device)
    lengths = attention_mask.long().sum(-1, keepdim=True)  # (rows, 1) of the prompts
    if after_prompt:
        lengths = torch.zeros_like(lengths)
    return (lengths + positions) // size


def ranks_in_blocks(values: Tensor, numbers: Tensor) -> Tensor:
    """The rank, from 0, of each of `values` (rows, draws, canvas) within its block, the lowest first and in a tie the
    left one; `numbers` (rows, canvas) are those of the blocks, from left to right."""
    by_value = values.argsort(dim=-1, stable=True)
    blocks = numbers.unsqueeze(1).expand_as(values)
    by_block = blocks.gather(-1, by_value).argsort(dim=-1, stable=True)
    order = by_value.gather(-1, by_block)  # block after block
    firsts = torch.searchsorted(numbers.contiguous(), numbers.contiguous())  # of each token's block
    return order.argsort(-1) - firsts.unsqueeze(1)


def steps_in_blocks(order: Tensor, blocks: Tensor | None) -> Tensor:
    """The step numbers `order` (rows, gen_length), counted from the first step of each token's own block; -1 stays.

    One view of a block-causal model contains a step of every block (`d1/scoring/views.py`).
    """
    if blocks is None:
        return order
    blocks = blocks - blocks[:, :1]
    largest = torch.iinfo(order.dtype).max
    # The first step of each block: the smallest number of its tokens that were revealed at all.
    counted = order.masked_fill(order < 0, largest)
    firsts = torch.full_like(order, largest).scatter_reduce(1, blocks, counted, "amin")
    return torch.where(order < 0, order, order - firsts.gather(1, blocks))


@dataclass(frozen=True)
class Randomness:
    """The random numbers of a draw.

    Attributes:
        generators: one per row, so that a row's views depend neither on its batch nor on the number of processes.
        shared: a generator in the same state on all processes; always draw from it for all `total_rows`, not only for
            the rows of this process.
        first_row: the number, within the rollout of all processes, of the first row of this process.
        total_rows: rows of the rollout, over all processes.
        update, updates: the number, from 0, of the update for which the views are drawn, and the number of draws.
        of_rollout: as `shared`, and in the same state in the draw of every update; None: there is one draw.
    """

    generators: Sequence[Generator]
    shared: Generator
    first_row: int
    total_rows: int
    update: int = 0
    updates: int = 1
    of_rollout: Generator | None = None

    def evenly_spread(self, draws: int) -> Tensor:
        """(rows, draws) in [0, 1), fp64: each is uniform; those of the whole rollout are spread evenly (`strata`)."""
        order = torch.randperm(self.total_rows * draws, generator=self.shared)
        # In fp32 a stratum far from 0 has few numbers, and the last of them would be rounded up into the next stratum.
        numbers = strata(order, torch.rand((), generator=self.shared, dtype=torch.float64))
        return self.local_slice(numbers.view(self.total_rows, draws))

    def rotated(self, draws: int) -> Tensor:
        """(rows, draws) in [0, 1): each is uniform, and those of the whole rollout are equally spaced (`rotation`)."""
        return self.local_slice(rotation(self.total_rows, draws, torch.rand((), generator=self.shared)))

    def uniform(self, draws: int) -> Tensor:
        """(rows, draws) in [0, 1), independent; each row draws from its own generator."""
        return torch.stack([torch.rand(draws, generator=generator) for generator in self.generators])

    def local_slice(self, of_all_rows: Tensor) -> Tensor:
        """The part of `of_all_rows` (all rows, ...) that belongs to the rows of this process."""
        return of_all_rows[self.first_row : self.first_row + len(self.generators)]

    def own(self, of_all_rows: Tensor) -> Tensor:
        """Deprecated: the old name of `local_slice`."""
        warnings.warn("Randomness.own is now local_slice", FutureWarning, stacklevel=2)
        return self.local_slice(of_all_rows)

    @property
    def rows(self) -> Sequence[Generator]:
        """Deprecated: the old name of `generators`."""
        warnings.warn("Randomness.rows is now generators", FutureWarning, stacklevel=2)
        return self.generators


def strata(order: Tensor, u: Tensor) -> Tensor:
    """(S,) one number in each of S equal parts of [0, 1), in the order of a permutation `order`; `u` in [0, 1) is the
    common offset within the parts (AGRPO, arXiv 2510.04019, has such draws, with an offset of its own in each part)."""
    return (order + u) / len(order)


def rotation(rows: int, draws: int, u: Tensor) -> Tensor:
    """(rows, draws): draw v of row i is (v + i / rows) / draws + u, modulo 1. The draws of a row are equally spaced
    (BGPO), and so are those of all rows together (LLaDA, ESPO)."""
    starts = torch.arange(rows, dtype=u.dtype).unsqueeze(1) / rows
    return ((torch.arange(draws) + starts) / draws + u) % 1


def draw_hidden_prompt(sampled: SampledRows, random: Randomness, p: float, views: int) -> Tensor:
    """(rows, views, prompt) bool: each view hides each maskable token of the prompt with probability `p`."""
    return torch.stack([draw_masks(sampled.maskable, p, random.generators) for _ in range(views)], dim=1)
