"""The states of a trace in which the model is trained, and what each state hides.

They are drawn from a row's own generator, so that they depend neither on its batch nor on the number of processes.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from torch import Generator, Tensor

from d1.masking import draw_mask, noise_level
from d1.sampling import SamplingSettings, eos_cut

COLUMNS = ("ids", "steps", "blocks", "right")  # of `Traces`


@dataclass(frozen=True)
class Traces:
    """Completions as they were sampled, on the host."""

    ids: Tensor  # (rows, canvas)
    steps: Tensor  # (rows, canvas), the row's forward pass, from 0, that revealed each token; -1 after the EOS stop
    blocks: Tensor  # (rows, canvas), the number of each token's block, from 0
    right: Tensor  # (rows,) bool, whether the row is trained on
    eos_token_ids: Sequence[int]  # the tokens that end a completion; the first one, EOS, fills the canvas after it

    def at(self, rows: Tensor) -> Traces:
        """The traces with these indices (n,)."""
        return replace(self, **{name: getattr(self, name)[rows] for name in COLUMNS})

    @property
    def lengths(self) -> Tensor:
        """(rows, 1) tokens up to and including the first one that ends the completion."""
        return eos_cut(self.ids, self.eos_token_ids).sum(-1, keepdim=True)

    def scored_positions(self, tail: int) -> Tensor:
        """(rows, canvas) bool: a completion and `tail` positions after it; -1: all positions."""
        if tail < 0:
            return torch.ones_like(self.ids, dtype=torch.bool)
        return torch.arange(self.ids.shape[1]) < self.lengths + tail

    @property
    def filled(self) -> Tensor:
        """(rows, canvas) ids, with EOS at all positions after the completion's end."""
        return self.ids.masked_fill(~eos_cut(self.ids, self.eos_token_ids), self.eos_token_ids[0])


@dataclass(frozen=True)
class States:
    """The states of a batch, and the positions; on the host."""

    ids: Tensor  # (rows, canvas) the tokens of the text
    noise: Tensor  # (rows, states, canvas) bool, what each state hides
    positions: Tensor  # (rows, states, canvas) bool, hidden positions that the loss scores


def blocks_of_canvas(settings: SamplingSettings, prompt_lengths: Sequence[int], size: int | None) -> Tensor:
    """(rows, canvas) the number of each position's block, from 0; `size` is the block size of a block-causal model."""
    rows = []
    for prompt_length in prompt_lengths:
        prompt_part = None if size is None else prompt_length % size  # of the first block
        lengths = torch.tensor([sum(block) for block in settings.schedule(prompt_part)])
        rows.append(torch.arange(len(lengths)).repeat_interleave(lengths))
    return torch.stack(rows)


def halves(traces: Traces, generators: Sequence[Generator], tail: int) -> States:
    """dParallel's two states of each trace: a block is drawn uniformly; earlier blocks are shown, later ones hidden. In
    this block the first state hides each token with probability 1/2, and the second state hides the others."""
    scored = traces.scored_positions(tail)  # (rows, canvas)
    half = noise_level(torch.tensor(0.5))

    # The drawn block of each row, and its two halves.
    drawn_blocks, row_halves = [], []
    for blocks, row_scored, generator in zip(traces.blocks, scored, generators, strict=True):
        last_block = int(blocks[row_scored].max())
        drawn = int(torch.randint(last_block + 1, (), generator=generator))
        in_block = blocks == drawn
        first = draw_mask(in_block, half, generator)
        row_halves.append(torch.stack([first, in_block & ~first]))
        drawn_blocks.append(drawn)
    hidden_halves = torch.stack(row_halves)  # (rows, 2, canvas)

    # Both states also hide the later blocks and the tail.
    later = traces.blocks > torch.tensor(drawn_blocks).unsqueeze(1)
    noise = hidden_halves | (later | ~scored).unsqueeze(1)
    return States(traces.filled, noise, positions=hidden_halves & scored.unsqueeze(1))
