"""The text that is being filled, the progress of each row, and the EOS stop, which decides which rows leave."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Generator, Tensor

from d1.sampling.passes import Place
from d1.sampling.predict import Generators
from d1.sampling.settings import SamplingSettings


def eos_cut(completion_ids: Tensor, eos_token_ids: Sequence[int] | Tensor, including: bool = True) -> Tensor:
    """(rows, tokens) bool: true before each row's first EOS and, if `including`, at it; all true without an EOS."""
    is_eos = torch.isin(completion_ids, torch.as_tensor(eos_token_ids, device=completion_ids.device))
    return is_eos.cumsum(-1) - is_eos.long() * including == 0


@dataclass
class Canvas:
    """The rows of a text that is being filled."""

    ids: Tensor  # (rows, length), with the mask token where a token is hidden
    visible: Tensor  # (rows, length), 1 at real tokens
    given: Tensor  # (rows, length) bool, the real tokens that were there at the start
    places: Tensor  # (rows, n) the columns to fill: block after block, each from left to right
    passes: Tensor  # (rows,), as in `Rollout`
    forward_tokens: Tensor  # (rows,), as in `Rollout`
    # (rows,) fp32, the sum of the log-probs and entropies of all that was written: not finite once one of them was not.
    sums: Tensor

    @classmethod
    def of(cls, ids: Tensor, visible: Tensor, given: Tensor, places: Tensor) -> Canvas:
        passes, forward_tokens = torch.zeros(2, len(ids), dtype=torch.long, device=ids.device)
        return cls(ids, visible, given, places, passes, forward_tokens, torch.zeros(len(ids), device=ids.device))

    @property
    def start(self) -> int:
        """The column after the prompt, if all columns after the prompt are to be filled."""
        return self.ids.shape[1] - self.places.shape[1]


def start_canvas(prompt_ids: Tensor, attention_mask: Tensor, gen_length: int, mask_token_id: int) -> Canvas:
    """The canvas of a completion: mask tokens after the prompt."""
    (rows, width), device = prompt_ids.shape, prompt_ids.device
    real, masks = attention_mask.long(), prompt_ids.new_full((rows, gen_length), mask_token_id)
    return Canvas.of(
        ids=torch.cat([prompt_ids, masks], dim=1),
        visible=torch.cat([real, torch.ones_like(masks)], dim=1),
        given=torch.cat([real, torch.zeros_like(masks)], dim=1).bool(),
        places=torch.arange(width, width + gen_length, device=device).expand(rows, -1),
    )


@dataclass
class Row:
    """The progress of one row."""

    number: int  # the place of its prompt in the stream
    prompt: int  # columns before the completion that passes process: the prompt's tokens, with or without padding
    inside: int  # of these, the columns from a start of a block of a block-causal model to the completion
    schedule: list[list[int]]  # tokens revealed in each step of each block
    generator: Generator | None = None  # its own; None if it draws nothing or draws from the generator of the batch
    block: int = -1  # current block and step, from 0
    step: int = 0
    filled: int = 0  # tokens of the completion before the block
    left: int = 0  # tokens that the next pass predicts: those that the block hides, or with editing all; 0: it is done
    hides: int = 0  # with editing, tokens that the block still hides
    post: int = 0  # with editing, passes since it hid none
    # In a stream whose rows differ:
    settings: SamplingSettings | None = None  # what its tokens are drawn by; None: what the sampler's are
    ends: tuple[int, ...] = ()  # of the EOS stop
    offset: int = 0  # columns of the longest completion that this shorter one leaves to its prompt, which ends later

    @property
    def length(self) -> int:
        """Tokens of the completion."""
        return sum(map(sum, self.schedule))

    def shift(self, columns: int) -> None:
        """Continues on a canvas whose longest completion has so many more columns."""
        self.offset, self.filled = self.offset + columns, self.filled + columns
        self.prompt, self.inside = self.prompt - columns, self.inside - columns

    @property
    def size(self) -> int:
        return sum(self.schedule[self.block])

    @property
    def later(self) -> int:
        """How many tokens of the block the schedule leaves to the steps after the next."""
        return sum(self.schedule[self.block][self.step + 1 :])

    @property
    def is_whole(self) -> bool:
        return self.left == 0 and self.block == len(self.schedule) - 1

    def open_block(self) -> None:
        """Begin the next block."""
        self.filled += self.size if self.block >= 0 else 0
        self.block, self.step = self.block + 1, 0
        self.left = self.hides = self.size
        self.post = 0

    def edited(self, hides: int, edits: int, post_steps: int) -> int:
        """What is `left` with editing after a pass that made so many `edits` and left so many tokens hidden: nothing
        after a pass over a full block without edits, or after `post_steps` of them."""
        had_masks, self.hides = self.hides > 0, hides
        self.post += not had_masks
        settled = not had_masks and not edits
        return 0 if not hides and (settled or self.post >= post_steps) else self.size


@dataclass
class Batch:
    """The rows at work, their canvas, the places (rows, longest block) that are still hidden in their blocks, and the
    generator of rows that have none of their own."""

    rows: list[Row]
    canvas: Canvas
    hidden: Tensor
    generator: Generator | None = None

    @classmethod
    def of(cls, rows: list[Row], canvas: Canvas, generator: Generators = None) -> Batch:
        """A batch of new rows; if `generator` is a list, each row gets its own from it."""
        if isinstance(generator, Sequence):
            for row, own in zip(rows, generator, strict=True):
                row.generator = own
        longest = max((sum(block) for row in rows for block in row.schedule), default=0)
        hidden = torch.zeros(len(rows), longest, dtype=torch.bool, device=canvas.ids.device)
        return cls(rows, canvas, hidden, None if isinstance(generator, Sequence) else generator)

    def upload(self, numbers: Any) -> Tensor:
        """Copy whole numbers to the device, without waiting for it."""
        return torch.tensor(numbers, dtype=torch.long).to(self.hidden.device, non_blocking=True)

    def generators(self, rows: list[int]) -> Generators:
        """Those of these rows, or that of the batch where they have none."""
        own = [self.rows[row].generator for row in rows]
        each = [generator for generator in own if generator is not None]
        return each if len(each) == len(own) else self.generator

    def open_blocks(self, live: list[int]) -> list[Place]:
        """Begin the next block of each row of `live` whose block is full, and return the places of all their blocks."""
        opened = [row for row in live if self.rows[row].left == 0]
        for row in opened:
            self.rows[row].open_block()
        sizes = self.upload([self.rows[row].size for row in opened]).unsqueeze(1)
        self.hidden[self.upload(opened)] = torch.arange(self.hidden.shape[1], device=sizes.device) < sizes
        start, places = self.canvas.start, []
        for state in (self.rows[row] for row in live):
            first = start + state.filled
            places.append(Place(first, first + state.size, start - state.prompt, start - state.inside))
        return places

    def finished(self, live: list[int], ends: Sequence[int]) -> list[int]:
        """The rows of `live` that are whole or ended by the EOS stop, which fills the later blocks of a row."""
        done = [row for row in live if self.rows[row].is_whole]
        between = [row for row in live if self.rows[row].left == 0 and not self.rows[row].is_whole]
        if not ends or not between:
            return done
        rows, end_ids = self.upload(between), self.upload(ends)
        filled = self.upload([self.rows[row].filled + self.rows[row].size for row in between]).unsqueeze(1)
        firsts = self.upload([self.rows[row].offset for row in between]).unsqueeze(1)
        completions = self.canvas.ids[:, self.canvas.start :]
        own = completions[rows]
        places = torch.arange(own.shape[1], device=own.device)
        hidden = places >= filled
        ended = (torch.isin(own, end_ids) & ~hidden & (places >= firsts)).any(1)
        completions[rows] = own.masked_fill(ended.unsqueeze(1) & hidden, ends[0])
        over = ended.tolist()  # the block's one host sync
        return sorted([*done, *(row for row, ends_here in zip(between, over, strict=True) if ends_here)])
