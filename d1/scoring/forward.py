"""The forward pass that gives the hidden states of a view: an entry of the kind of model.

Here are the passes of models with full attention and of block-causal ones. Models with a causal context and models with
uniform noise have files of their own (`causal.py`, `uniform.py`).

With full attention, views cannot share the states of the prompt: every position attends to all others, hidden or not.

A block-causal model scores each block given the finished blocks before it, as in sampling: a view hides tokens of the
token's own block, and earlier blocks are clean. All blocks of a view share one forward pass over two streams, the clean
text and the noised canvas (`d1/models/packing.py`).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from d1.models.attention import count_positions, has_causal_context, over_queries, takes_masks_over_queries
from d1.models.head import backbone_and_head
from d1.models.kinds import block_size, has_masks
from d1.models.packing import two_stream_states
from d1.scoring.causal import causal_states
from d1.scoring.inputs import CanvasBlocks
from d1.scoring.uniform import uniform_states, uniform_tokens
from d1.scoring.view_text import ViewText


@dataclass(frozen=True)
class Forward:
    """A kind of forward pass.

    Attributes:
        states: (rows, n, hidden) of a text, the last of which are those of the canvas.
        noised_tokens: of a model's config and `gen_length`, how many tokens at the end of a text a pass processes
            twice: clean and noised (with blocks), or by encoder and decoder (with uniform noise).
    """

    states: Callable[[Any, ViewText], Tensor]
    noised_tokens: Callable[[Any, int], int]


def forward_of(config: Any) -> Forward:
    """How a model of this config computes the states of a view."""
    if not has_masks(config):
        return UNIFORM
    if block_size(config) is None:
        return FULL
    if has_causal_context(config):
        return CAUSAL
    return BLOCK_CAUSAL


def hidden_states(
    model: Any,
    clean: Tensor,
    hidden: Tensor,
    visible: Tensor | None,
    *,
    gen_length: int,
    mask_token_id: Any,
    shown: Tensor | None = None,
    blocks: CanvasBlocks | None = None,
) -> Tensor:
    """States (rows, n, hidden) of texts whose `hidden` tokens are masked and whose other tokens are those of `shown`
    (None: of `clean`); the last states are those of the canvas. `blocks` as for `score`."""
    if shown is None:
        shown = clean
    text = ViewText(clean, shown, hidden, visible, gen_length, mask_token_id, blocks)
    return forward_of(model.config).states(model, text)


def tokens_of_pass(model: Any, visible: Tensor, gen_length: int) -> Tensor:
    """() the number of tokens that a pass over texts processes, `visible` (rows, tokens) of them. With blocks,
    those of the second stream count, too: the canvas and, without a causal context, prompt tokens that may share its
    first block."""
    tokens = visible.sum()
    noised = forward_of(model.config).noised_tokens(model.config, gen_length)
    if noised:
        tokens = tokens + visible[:, -noised:].sum()
    return tokens


def full_states(model: Any, text: ViewText) -> Tensor:
    """One pass over the noised text."""
    run_backbone = backbone_and_head(model)[0]
    if text.visible is None or not takes_masks_over_queries(model.config):
        return run_backbone(text.noised, text.visible)
    mask = over_queries(text.visible, text.visible.shape[1])  # with this mask, a pass does not wait for the device
    return run_backbone(text.noised, mask, position_ids=count_positions(text.visible))


def block_causal_states(model: Any, text: ViewText) -> Tensor:
    """Two streams: finished blocks with the prompt as the view shows it, and the canvas with what the view hides."""
    noised = block_causal_tokens(model.config, text.gen_length)
    return two_stream_states(model, text.finished, text.noised[:, -noised:], text.visible)


def block_causal_tokens(config: Any, gen_length: int) -> int:
    """The canvas, and prompt tokens that may share its first block."""
    return gen_length + config.block_size - 1


FULL = Forward(full_states, lambda config, gen_length: 0)
BLOCK_CAUSAL = Forward(block_causal_states, block_causal_tokens)
CAUSAL = Forward(causal_states, lambda config, gen_length: gen_length)
UNIFORM = Forward(uniform_states, uniform_tokens)
