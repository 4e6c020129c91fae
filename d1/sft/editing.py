"""Noise that stays visible: some answer tokens are replaced, and the model learns to correct them (LLaDA2.1's T2T).

LLaDA2.1 (arXiv 2602.08676, section 3.1) says that its SFT mixes masks with random tokens to be corrected, and adds data
by several turns. The shares, weights, drafts and turns here are this library's own choices:

- Each answer token that no mask hides is replaced with probability `share`: by an id drawn uniformly from the
  vocabulary, or by a draft, which is drawn from the model's own prediction with these tokens hidden, too.
- Replaced tokens count with `weight`, unchanged visible ones with `keep_weight`, hidden ones with 1 / t'. Equal weights
  make p(token | what is seen) the true one; with a `keep_weight` of 0, a model learns that visible tokens are wrong.
- With `turns` > 1, the model's draws take the positions of the replaced tokens, and it corrects them again. The loss is
  the mean over turns. No gradient goes through a draft.

The random numbers come from the row's own generator, after those of its mask, so the mask is the same without edits.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Generator, Tensor

from d1.models.head import CHUNK_ELEMENTS, backbone_and_head, calls_in_step, run_inside
from d1.runs.data import IGNORED
from d1.sft.losses import Positions, hidden_states, token_positions, weighted_losses

GOLDEN = 0.6180339887498949  # added to a uniform number once per turn: modulo 1 it is uniform again


@dataclass(frozen=True)
class EditNoise:
    """The settings above, as `SFTConfig` has them."""

    kind: str  # "uniform" or "draft"
    share: float
    weight: float
    keep_weight: float
    turns: int

    def draw(self, answer: Tensor, hidden: Tensor, generator: Generator) -> tuple[Tensor, Tensor]:
        """Which tokens of a row are replaced, (tokens,) bool, and uniform numbers (tokens,) that choose the new ids."""
        numbers = torch.zeros(2, len(answer))
        numbers[:, answer] = torch.rand(2, int(answer.sum()), generator=generator)
        return answer & ~hidden & (numbers[0] < self.share), numbers[1]

    def replace(self, noised: Tensor, edited: Tensor, draws: Tensor, vocabulary: int, mask_token_id: int) -> Tensor:
        """`noised` (...) with uniform ids where `edited`; for drafts, these positions are hidden until the model has
        drawn them (`insert_drafts`)."""
        if self.kind == "draft":
            return noised.masked_fill(edited, mask_token_id)
        ids = (draws.double() * (vocabulary - 1)).long()
        return torch.where(edited, ids + (ids >= mask_token_id), noised)  # skips the mask token


def edit_losses(model: Any, inputs: dict[str, Any], weights: Tensor, noise: EditNoise, mask_token_id: int) -> Tensor:
    """(rows,) sums over each row's answer of weights x cross-entropy, the mean over turns; `weights`, (rows, length),
    are those of hidden tokens."""
    edited, labels = inputs["edited"], inputs["labels"]
    visible_weights = torch.where(edited, noise.weight, noise.keep_weight)
    weights = torch.where(inputs["masked"], weights, visible_weights)
    scored = (labels != IGNORED) & (weights > 0)
    scored, replaced = torch.stack([scored, edited]).cpu().unbind()  # one wait for the device
    if not replaced.any():
        replaced[0, 0] = True  # every process has to call the model; without `edited`, its draw is not used
    positions = token_positions(replaced, labels.device)

    losses = []
    for turn in range(noise.turns):
        if turn > 0 or noise.kind == "draft":
            inputs = insert_drafts(model, inputs, replaced, positions, turn, mask_token_id)
        losses.append(weighted_losses(model, inputs, scored, weights))
    return torch.stack(losses).mean(0)


@torch.no_grad()
def insert_drafts(
    model: Any, inputs: dict[str, Any], replaced: Tensor, positions: Positions, turn: int, mask_token_id: int
) -> dict[str, Any]:
    """The batch with the model's own draws, without dropout, as its `replaced` tokens (rows, length)."""

    def draw(inner: Any) -> Tensor:
        states = hidden_states(inner, inputs, replaced, positions)
        draws = ((inputs["draws"][positions] + turn * GOLDEN) % 1).double()
        # The logits of a chunk are in memory in fp64, and so are their sums.
        chunk_size = max(1, CHUNK_ELEMENTS // 4 // inner.config.vocab_size)
        chunks = calls_in_step(inner, -(-len(states) // chunk_size))
        head = backbone_and_head(inner)[1]
        ids = []
        for chunk_states, chunk_draws in zip(states.tensor_split(chunks), draws.tensor_split(chunks), strict=True):
            logits = head(chunk_states).double()
            ids.append(sample_ids(logits, chunk_draws, mask_token_id))
        return torch.cat(ids)

    training = model.training
    model.eval()
    ids = run_inside(model, draw)
    model.train(training)
    noised = inputs["input_ids"].clone()
    noised[positions] = torch.where(inputs["edited"][positions], ids, noised[positions])
    return inputs | {"input_ids": noised}


def sample_ids(logits: Tensor, draws: Tensor, mask_token_id: int) -> Tensor:
    """(n,) ids, each the quantile `draws` (n,) of the distribution of `logits` (n, vocab), without the mask token."""
    logits[..., mask_token_id] = -torch.inf
    cumulative = logits.softmax(-1).cumsum(-1)
    thresholds = draws.unsqueeze(-1) * cumulative[..., -1:]
    ids = torch.searchsorted(cumulative, thresholds, right=True).squeeze(-1)
    return ids.clamp(max=logits.shape[-1] - 1)
