"""SFT of models with a causal context: the masks, and the next token of the clean text, in one pass (`CausalLoss`)."""

from __future__ import annotations

import itertools
from typing import Any, NamedTuple

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


class ContextTokens(NamedTuple):
    """The tokens of a batch that have a loss: clean ones, by the token that follows them, and masks, by their own.

    The masks (rows, length) of both are on the CPU, so that neither pass waits for the device.
    """

    clean: Tensor  # (rows, length) bool, clean tokens whose next token belongs to the answer
    masked: Tensor  # (rows, length) bool, hidden tokens
    clean_positions: Positions
    masked_positions: Positions
    clean_targets: Tensor  # (clean tokens,) ids of the next tokens
    masked_targets: Tensor  # (masked tokens,) ids of the hidden tokens


def context_tokens(inputs: dict[str, Any]) -> ContextTokens:
    """The tokens of a batch that have a loss; if there are none, its first token, which `sum_by_row` gives weight 0:
    every process has to call the head."""
    labels = inputs["labels"]
    masked = inputs["masked"].cpu()
    clean = torch.zeros_like(masked)
    clean[:, :-1] = (labels != IGNORED)[:, 1:].cpu()
    for end in itertools.accumulate(inputs.get("lengths", ())):
        clean[0, end - 1] = False  # the next token is that of another packed row
    if not (masked.any() or clean.any()):
        masked = masked.clone()
        masked[0, 0] = True

    clean_positions = token_positions(clean, labels.device)
    masked_positions = token_positions(masked, labels.device)
    rows, text_positions = clean_positions
    return ContextTokens(
        clean,
        masked,
        clean_positions,
        masked_positions,
        clean_targets=labels[rows, text_positions + 1],
        masked_targets=labels[masked_positions].clamp(min=0),
    )


def context_losses(model: Any, inputs: dict[str, Any], weights: Tensor, causal: CausalLoss) -> Tensor:
    """(rows,) for each row, the weighted cross-entropy of its masks, plus `causal.causal_weight` times that of its
    answer in the clean text. There the state of a token predicts the next token, so the first token of a text has no
    loss. The weights of masks are `weights` x `causal.masked_weight` x the batch's `masked_scale`, if it has one."""
    tokens = context_tokens(inputs)
    targets = torch.cat([tokens.clean_targets, tokens.masked_targets])

    def compute_losses(inner: Any) -> Tensor:
        states = causal_context_states(inner, inputs, tokens)
        return -target_logps(inner, states, targets)[0]

    losses = run_inside(model, compute_losses)
    return sum_by_row(inputs, tokens, losses, weights, causal)


def sum_by_row(
    inputs: dict[str, Any], tokens: ContextTokens, losses: Tensor, weights: Tensor, causal: CausalLoss
) -> Tensor:
    """(rows,) weighted sums of the `losses` of clean tokens and then masks, as `context_losses` has them."""
    weights = weights * causal.masked_weight * inputs.get("masked_scale", 1.0) * inputs["masked"]
    clean_rows, _ = tokens.clean_positions
    clean_weights = torch.full_like(clean_rows, causal.causal_weight, dtype=weights.dtype)
    token_weights = torch.cat([clean_weights, weights[tokens.masked_positions]])
    numbers = row_numbers(inputs)
    rows = torch.cat([numbers[tokens.clean_positions], numbers[tokens.masked_positions]])
    sums = losses.new_zeros(len(split_rows(inputs, "labels")))
    return sums.index_add(0, rows, losses * token_weights.to(losses.dtype))


def causal_context_states(model: Any, inputs: dict[str, Any], tokens: ContextTokens) -> Tensor:
    """Last hidden states (n, hidden size) of the clean tokens and then of the masks, row by row."""
    noised, labels, lengths, starts = inputs["input_ids"], inputs["labels"], inputs.get("lengths"), inputs["starts"]
    clean_mask, masked = tokens.clean, tokens.masked
    size = block_size(model.config) or 1
    clean = torch.where(labels == IGNORED, noised, labels)
    if lengths is not None:
        blocks = [Blocks(size, start) for start in starts]
        return packed_two_stream_states(model, clean, noised, lengths, masked, blocks=blocks, clean_at=clean_mask)

    # The noised stream begins at or before the first block with a hidden token.
    first = max(0, int(masked.any(0).int().argmax()) - size + 1)
    # Positions of each row's clean tokens, left to right; rows with fewer of them are filled with others.
    width = int(clean_mask.sum(1).max())
    clean_at = clean_mask.logical_not().byte().argsort(dim=1, stable=True)[:, :width]
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
    ranks = (clean_mask.cumsum(1) - 1)[clean_mask].to(clean.device, non_blocking=True)
    clean_rows, _ = tokens.clean_positions
    masked_rows, masked_text_positions = tokens.masked_positions
    return torch.cat([states[clean_rows, ranks], states[masked_rows, width + masked_text_positions - first]])


def masked_scale(inputs: dict[str, Tensor], answers: Tensor | int | None, hidden: Tensor | None) -> Tensor:
    """The factor by which the loss of masks is divided by the step's `hidden` tokens instead of its `answers`
    (`row_noise` of `CausalLoss`). If one is None, in a call outside of training, both are those of this batch."""
    if answers is None or hidden is None:
        answers = (inputs["labels"] != IGNORED).sum()
        hidden = inputs["masked"].sum()
    return answers / hidden.clamp(min=1)
