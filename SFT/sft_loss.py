"""Cross-entropies of the hidden tokens, without ever holding the logits of more than a chunk of them."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils.checkpoint import checkpoint

LOGITS_CHUNK = 256  # rows of logits alive at a time: at LLaDA's vocabulary 0.13 GB in fp32
LOGITS_KEPT = 2**25  # logits that may wait for the backward pass: 0.13 GB in fp32


def hidden_token_losses(
    model: Any,
    unwrapped: Any,
    input_ids: Tensor,
    attention_mask: Tensor,
    hidden: Tensor,
    targets: Tensor,
    chunk_size: int = LOGITS_CHUNK,
) -> Tensor:
    """Cross-entropy of the model's prediction at each hidden position.

    The output layer is applied to the hidden positions alone, and in chunks whose logits, but for the last ones, are
    computed again in the backward pass. This happens inside the model's own forward pass, in the output layer's place,
    so that wrappers which gather that layer's weights there (DDP, ZeRO-3, FSDP) see an ordinary call.

    Args:
        model: the model as wrapped for training; called with `input_ids` and `attention_mask`, (rows, length) each.
        unwrapped: the same model without wrappers. Its output embeddings must be the last thing it applies.
        hidden: (rows, length) bool, the positions to predict; at least one.
        targets: the clean tokens at these positions, in row-major order.

    Returns:
        One loss a hidden position, in nats, fp32 (fp64 for a model in fp64).

    Raises:
        TypeError: the model has no output embeddings.
    """
    head = unwrapped.get_output_embeddings()
    if head is None:
        raise TypeError(f"{type(unwrapped).__name__} has no output embeddings, so it cannot predict tokens")
    project, config = head.forward, unwrapped.config
    softcap = getattr(config, "final_logit_softcapping", None)  # Gemma squashes its logits; here it would squash losses

    def chunk_losses(states: Tensor, tokens: Tensor) -> Tensor:
        logits = project(states)
        logits = logits if softcap is None else softcap * torch.tanh(logits / softcap)
        logits = logits if logits.dtype == torch.float64 else logits.float()
        return F.cross_entropy(logits, tokens, reduction="none")

    def losses(states: Tensor) -> Tensor:
        pieces = list(zip(states[hidden].split(chunk_size), targets.split(chunk_size), strict=True))
        # The backward pass begins with the last ones and frees them before it computes others again.
        recomputed = len(pieces) - max(1, LOGITS_KEPT // (chunk_size * config.vocab_size))
        return torch.cat(
            [
                checkpoint(chunk_losses, *piece, use_reentrant=False, preserve_rng_state=False)
                if number < recomputed
                else chunk_losses(*piece)
                for number, piece in enumerate(pieces)
            ]
        )

    patched = "forward" in vars(head)  # some wrappers (bitsandbytes, accelerate) already keep their own there
    head.forward = losses
    if softcap is not None:
        config.final_logit_softcapping = None
    try:
        return model(input_ids=input_ids, attention_mask=attention_mask).logits
    finally:
        if softcap is not None:
            config.final_logit_softcapping = softcap
        if patched:
            head.forward = project
        else:
            del head.forward
