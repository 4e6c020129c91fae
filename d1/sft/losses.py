"""The loss of a batch's hidden tokens, row by row, without the logits of all positions at once; and its parts, which
other noises use, too (`d1/sft/editing.py`, `d1/sft/causal_context.py`, `d1/sft/scdd.py`, `d1/sft/diffusion_gemma.py`).
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from d1.models.head import backbone_and_head, run_inside, target_logps
from d1.models.kinds import block_size
from d1.models.packing import packed_two_stream_states, two_stream_states
from d1.runs.data import IGNORED
from d1.sft.data import row_numbers, split_rows

Positions = tuple[Tensor, Tensor]  # rows and positions, (n,) each, of n tokens of a batch


def weighted_losses(model: Any, inputs: dict[str, Any], scored: Tensor, weights: Tensor) -> Tensor:
    """(rows,) sums of weights x cross-entropy over each row's `scored` tokens, (rows, length) bool on the CPU."""
    labels = inputs["labels"]
    if not scored.any():  # score one token with weight 0, because every process has to call the head
        scored = scored.clone()
        scored[0, 0] = True
        weights = torch.zeros_like(weights)
    positions = token_positions(scored, labels.device)

    def compute_losses(inner: Any) -> Tensor:
        states = hidden_states(inner, inputs, scored, positions)
        return -target_logps(inner, states, labels[positions].clamp(min=0))[0]

    losses = run_inside(model, compute_losses)
    sums = losses.new_zeros(len(split_rows(inputs, "labels")))
    return sums.index_add(0, row_numbers(inputs)[positions], losses * weights[positions].to(losses.dtype))


def token_positions(tokens: Tensor, device: torch.device) -> Positions:
    """Rows and positions of the `tokens` (rows, length) bool of a batch, on `device`."""
    rows, positions = tokens.nonzero().to(device, non_blocking=True).unbind(1)
    return rows, positions


def hidden_states(model: Any, inputs: dict[str, Any], tokens: Tensor, positions: Positions) -> Tensor:
    """Last hidden states (n, hidden size) of a batch's `tokens`, row by row; `positions` are theirs on the device.

    With `tokens` on the CPU, no pass waits for the device; a boolean index on the device would. A block-causal
    model also reads the clean rows; the noised rows follow them, from the first block with one of the tokens on.
    """
    noised, labels, visible = inputs["input_ids"], inputs["labels"], inputs["attention_mask"]
    rows, text_positions = positions
    lengths = inputs.get("lengths")
    size = block_size(model.config)
    if size is None:
        backbone = backbone_and_head(model)[0]
        if lengths is None:
            return backbone(noised, visible)[rows, text_positions]
        segments = [(length, 0) for length in lengths]
        return backbone(noised, None, text_positions.unsqueeze(0), segments=segments)[0]

    clean = torch.where(labels == IGNORED, noised, labels)
    if lengths is not None:
        return packed_two_stream_states(model, clean, noised, lengths, tokens)
    first = int(tokens.any(0).int().argmax()) // size * size
    return two_stream_states(model, clean, noised[:, first:], visible)[rows, text_positions - first]
