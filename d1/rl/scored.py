"""Which tokens of a canvas count in the loss, named by `scored_tokens`. Methods differ in what they do with the tokens
after the first EOS. A new choice is a function and a row of `SCORED`."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from d1.rl.updates import Batch, Everyone, fitted


class Sampled(NamedTuple):
    """The sampled canvases and their special tokens, (rows, canvas) each.

    Attributes:
        ids: token ids of the whole canvas.
        ended: bool, the tokens up to and including the first EOS.
        steps: the step that revealed each token; -1 for tokens that were not revealed.
        is_end: bool, the tokens that end a text.
        is_padding: bool, the tokenizer's padding token, which may also end a text.
    """

    ids: Tensor
    ended: Tensor
    steps: Tensor
    is_end: Tensor
    is_padding: Tensor


@dataclass(frozen=True)
class Scored:
    """A row of the table.

    Attributes:
        of: the tokens (rows, canvas) bool that count in the loss.
        behind_the_end: it may count tokens after the first EOS, so that the whole canvas must be sampled.
        reads_steps: it reads `Sampled.steps`.
    """

    of: Callable[[Sampled], Tensor]
    behind_the_end: bool = False
    reads_steps: bool = False


def to_the_last_text(sampled: Sampled) -> Tensor:
    """All tokens revealed up to the step that revealed the last token other than EOS (AGRPO, as released)."""
    last = torch.where(sampled.is_end, -1, sampled.steps).amax(-1, keepdim=True)
    return (sampled.steps >= 0) & (sampled.steps <= last)


SCORED: dict[str, Scored] = {
    "ended": Scored(lambda sampled: sampled.ended),
    "text": Scored(lambda sampled: sampled.ended & ~sampled.is_padding),
    "steps": Scored(to_the_last_text, behind_the_end=True, reads_steps=True),
    "canvas": Scored(lambda sampled: torch.ones_like(sampled.ended), behind_the_end=True),
}


def score_more(batch: Batch, name: str, end_ids: Sequence[int], pad_id: int | None, everyone: Everyone) -> None:
    """Makes the tokens that `SCORED[name]` chooses the batch's completions; rows that are out of the loss stay out."""
    ids, mask = batch["canvas_ids"], batch["completion_mask"]
    scored = SCORED[name].of(
        Sampled(
            ids=ids,
            ended=fitted(mask, ids.shape[1]).bool(),
            steps=batch["reveal_steps"],
            is_end=torch.isin(ids, torch.tensor(end_ids, device=ids.device)),
            is_padding=ids == (-1 if pad_id is None else pad_id),
        )
    )
    batch["completion_ids"] = ids
    batch["completion_mask"] = (scored & mask.any(-1, keepdim=True)).to(mask.dtype)
    batch["num_items_in_batch"] = everyone.gather(batch["completion_mask"].sum()).sum()
