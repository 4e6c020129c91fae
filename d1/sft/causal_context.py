"""SFT of models with a causal context: the masks, and the next token of the clean text, in one pass (`CausalLoss`)."""

from __future__ import annotations

import itertools
from typing import Any

import torch
from torch import Tensor

from d1.models.attention import Blocks
from d1.models.head import run_inside, target_logps
from d1.models.kinds import block_size
from d1.models.packing import packed_two_stream_states, two_stream_states
from d1.runs.data import IGNORED
from d1.sft.config import CausalLoss
from d1.sft.data import row_numbers, split_rows
from d1.sft.losses import Positions, token_positions


def context_losses(model: Any, inputs: dict[str, Any], weights: Tensor, causal: CausalLoss) -> Tensor:
    """(rows,) for each row, the weighted cross-entropy of its masks, plus `causal.causal_weight` times that of its
    answer in the clean text. There the state of a token predicts the next token, so the first token of a text has no
    loss. The weights of masks are `weights` x `causal.masked_weight` x the batch's `masked_scale`, if it has one."""
    labels = inputs["labels"]
    masked = inputs["masked"].cpu()
    weights = weights * causal.masked_weight * inputs.get("masked_scale", 1.0)
    predicts = torch.zeros_like(masked)
    predicts[:, :-1] = (labels != IGNORED)[:, 1:].cpu()
    for end in itertools.accumulate(inputs.get("lengths", ())):
        predicts[0, end - 1] = False  # the next token is that of another packed row
    if not (masked.any() or predicts.any()):  # as in `weighted_losses`
        masked = masked.clone()
        masked[0, 0] = True
        weights = torch.zeros_like(weights)

    clean_positions = token_positions(predicts, labels.device)
    masked_positions = token_positions(masked, labels.device)
    clean_rows, clean_text_positions = clean_positions
    targets = torch.cat([labels[clean_rows, clean_text_positions + 1], labels[masked_positions]]).clamp(min=0)

    def compute_losses(inner: Any) -> Tensor:
        states = causal_context_states(inner, inputs, predicts, clean_positions, masked, masked_positions)
        return -target_logps(inner, states, targets)[0]

    losses = run_inside(model, compute_losses)
    clean_weights = torch.full_like(clean_rows, causal.causal_weight, dtype=weights.dtype)
    token_weights = torch.cat([clean_weights, weights[masked_positions]])
    numbers = row_numbers(inputs)
    rows = torch.cat([numbers[clean_positions], numbers[masked_positions]])
    sums = losses.new_zeros(len(split_rows(inputs, "labels")))
    return sums.index_add(0, rows, losses * token_weights.to(losses.dtype))


def causal_context_states(
    model: Any,
    inputs: dict[str, Any],
    predicts: Tensor,
    clean_positions: Positions,
    masked: Tensor,
    masked_positions: Positions,
) -> Tensor:
    """Last hidden states (n, hidden size) of the clean tokens that `predicts` chooses, and then of the `masked` ones,
    row by row. As in `hidden_states`, nothing waits for the device."""
    noised, labels, lengths, starts = inputs["input_ids"], inputs["labels"], inputs.get("lengths"), inputs["starts"]
    size = block_size(model.config) or 1
    clean = torch.where(labels == IGNORED, noised, labels)
    if lengths is not None:
        blocks = [Blocks(size, start) for start in starts]
        return packed_two_stream_states(model, clean, noised, lengths, masked, blocks=blocks, clean_at=predicts)

    # The noised stream begins at or before the first block with a hidden token.
    first = max(0, int(masked.any(0).int().argmax()) - size + 1)
    # Positions of each row's clean tokens, left to right; rows with fewer of them are filled with others.
    width = int(predicts.sum(1).max())
    clean_at = predicts.logical_not().byte().argsort(dim=1, stable=True)[:, :width]
    origin = torch.tensor(starts).unsqueeze(1).to(clean.device, non_blocking=True)
    states = two_stream_states(
        model,
        clean,
        noised[:, first:],
        inputs["attention_mask"],
        blocks=Blocks(size, origin),
        clean_at=clean_at.to(clean.device, non_blocking=True),
    )

    # (rows, width + length - first, hidden size) -> (n, hidden size)
    ranks = (predicts.cumsum(1) - 1)[predicts].to(clean.device, non_blocking=True)
    clean_rows, _ = clean_positions
    masked_rows, masked_text_positions = masked_positions
    return torch.cat([states[clean_rows, ranks], states[masked_rows, width + masked_text_positions - first]])


def masked_scale(inputs: dict[str, Tensor], answers: Tensor | int | None, hidden: Tensor | None) -> Tensor:
    """The factor by which the loss of masks is divided by the step's `hidden` tokens instead of its `answers`
    (`row_noise` of `CausalLoss`). If one is None, in a call outside of training, both are those of this batch."""
    if answers is None or hidden is None:
        answers = (inputs["labels"] != IGNORED).sum()
        hidden = inputs["masked"].sum()
    return answers / hidden.clamp(min=1)
