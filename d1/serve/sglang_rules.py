"""What SGLang's plugin does in a forward pass: this library's rules, on blocks of several rows. Needs no SGLang."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Generator, Tensor

from d1.masking import keyed_generator
from d1.models.head import CHUNK_ELEMENTS
from d1.sampling.blocks import keep
from d1.sampling.canvas import Row
from d1.sampling.predict import predict_from
from d1.sampling.settings import SamplingSettings
from d1.serve.rows import key_of

# Per token, in SGLang's `meta_info`.
RECORDED = ("output_token_logprobs", "output_token_entropies", "step_maps", "forward_passes")


@dataclass
class Sampled:
    """A completion at work: its progress, and what is recorded of its finished blocks and of the one at hand."""

    row: Row
    settings: SamplingSettings
    generator: Generator
    ends: tuple[int, ...] = ()
    record: dict[str, list[Any]] = field(default_factory=lambda: {name: [] for name in RECORDED})
    open: bool = False  # a block is
    first: int = 0  # the column of the block where the completion begins
    begun: Any = None  # the generator's state at the start of the block
    block: Any = None  # (3, block): log-probs, entropies and steps
    passes: int = 0  # of the block at hand
    ended: bool = False  # a finished block holds one of `ends`
    broken: bool = False  # a log-prob or an entropy was not finite

    @classmethod
    def of(
        cls, prompt: int, rid: str, seed: int, ends: Sequence[int], settings: SamplingSettings, device: Any
    ) -> Sampled:
        inside = prompt % settings.block_length
        generator = keyed_generator(seed, *key_of(rid.partition(".")[0]), device=device)
        row = Row(0, prompt, inside, settings.schedule(inside), generator, settings=settings)
        return cls(row, settings, generator, tuple(ends))

    def begin(self, columns: int) -> bool:
        """Begins the next block or, if one is open (the engine has dropped its tokens), that block again; the latter is
        returned."""
        again, row = self.open, self.row
        if again:
            row.left, row.hides, row.step, row.post = row.size, row.size, 0, 0
            self.generator.set_state(self.begun)
        else:
            row.open_block()
            self.open, self.passes, self.begun = True, 0, self.generator.get_state()
        self.first = row.inside if row.block == 0 else 0
        self.block = torch.zeros(3, columns, device=self.generator.device)
        return again

    def close(self, ids: Sequence[int], values: Sequence[Sequence[float]]) -> None:
        """Adds the block's `ids` and (log-probs, entropies, steps) to the record."""
        own = slice(self.first, self.first + self.row.size)
        logps, entropies, steps = (column[own] for column in values)
        entries = [[logp, token, None] for logp, token in zip(logps, ids[own], strict=True)]
        passes = [self.passes] + [0] * (self.row.size - 1)
        new: tuple[list[Any], ...] = (entries, [*entropies], [*map(int, steps)], passes)
        for name, values_of_block in zip(RECORDED, new, strict=True):
            self.record[name].extend(values_of_block)
        self.open, self.ended = False, any(token in self.ends for token in ids[own])


def pass_of(ids: Tensor, logits: Tensor, sampled: Sequence[Sampled], mask_token_id: int) -> list[bool]:
    """What one forward pass writes into the blocks of rows that hide tokens or still edit, as `Sampler.step` has it.

    Args:
        ids: (rows, block), changed in place.
        logits: (rows, block, vocab).

    Returns:
        Whether each row's pass wrote nothing, so that the engine's keys and values are those of the final tokens.
    """
    settings, rows = sampled[0].settings, [one.row for one in sampled]
    columns = torch.arange(ids.shape[1], device=ids.device)
    firsts = torch.tensor([one.first for one in sampled], device=ids.device).unsqueeze(1)
    sizes = torch.tensor([row.size for row in rows], device=ids.device).unsqueeze(1)
    inside = (columns >= firsts) & (columns < firsts + sizes)
    hidden = (ids == mask_token_id) & inside
    asked = hidden if settings.edits is None else inside
    left = [row.left for row in rows]
    slots = asked.logical_not().byte().argsort(dim=1, stable=True)[:, : max(left)]
    still, before = hidden.gather(1, slots), ids.gather(1, slots).long()
    due = (still.sum(1) - torch.tensor([row.later for row in rows], device=ids.device)).clamp(min=1)
    own = logits.gather(1, slots.unsqueeze(-1).expand(-1, -1, logits.shape[-1])).float()
    generators = [one.generator for one in sampled]
    new, logps, entropies, recorded = predict_from(own, left, settings, mask_token_id, generators)
    chosen = keep(settings, logps, entropies, still, due, left, generators)
    edited = torch.zeros_like(chosen)
    if settings.edits is not None:
        edited = asked.gather(1, slots) & ~still & (new != before) & (logps.exp() > settings.edits)
        chosen = chosen | edited
    ids.scatter_(1, slots, torch.where(chosen, new, before).to(ids.dtype))
    wrong = chosen & ~(recorded + entropies).isfinite()
    counts = [still.sum(1) - (still & chosen).sum(1), edited.sum(1), chosen.sum(1), wrong.sum(1)]
    counted = torch.stack(counts, dim=1).tolist()
    for place, (one, (hides, edits, _, wrongs)) in enumerate(zip(sampled, counted, strict=True)):
        row, one.broken = one.row, one.broken or wrongs > 0
        row.left = hides if settings.edits is None else row.edited(hides, edits, settings.post_steps)
        row.step += 1
        now = torch.stack([recorded[place], entropies[place], torch.full_like(recorded[place], row.step)])
        at = slots[place]
        one.block[:, at] = torch.where(chosen[place], now, one.block[:, at])
    return [writes == 0 for _, _, writes, _ in counted]


def step_of(ids: Tensor, logits: Tensor, sampled: Sequence[Sampled | None], mask_token_id: int) -> list[bool]:
    """One forward pass of the engine over blocks; None for a row whose block holds a part of the prompt alone.

    Returns:
        Which blocks are finished: their tokens were final before the pass. Their record is complete.
    """
    done = [True] * len(sampled)
    alike: dict[SamplingSettings, list[int]] = {}
    for place, one in enumerate(sampled):
        if one is not None:
            one.passes += 1
        if one is not None and one.row.left:
            alike.setdefault(one.settings, []).append(place)
    at_once = max(1, CHUNK_ELEMENTS // 2 // logits.shape[1:].numel())
    for settings_places in alike.values():
        for start in range(0, len(settings_places), at_once):
            places = settings_places[start : start + at_once]
            some, rows = ids[places], [one for place in places if (one := sampled[place]) is not None]
            unchanged = pass_of(some, logits[places], rows, mask_token_id)
            ids[places] = some
            for place, one, same in zip(places, rows, unchanged, strict=True):
                done[place] = same and one.row.left == 0
    return done


def finish(ids: Tensor, closing: Sequence[tuple[int, Sampled]]) -> None:
    """Records the finished blocks of these rows of `ids`."""
    if closing:
        blocks = [torch.cat([one.block.double(), ids[place].double().unsqueeze(0)]) for place, one in closing]
        for (_, one), (*values, tokens) in zip(closing, torch.stack(blocks).tolist(), strict=True):
            one.close([*map(int, tokens)], values)
