"""What an estimator may know of sampled completions when it draws the views to score them in."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor


@dataclass(frozen=True)
class SampledRows:
    """Completions as a rollout left them.

    Attributes:
        prompt_ids, attention_mask: (rows, prompt), padded on the left.
        maskable: (rows, prompt) bool, the prompt tokens that may be hidden: never padding.
        completion_ids: (rows, tokens).
        scored: (rows, tokens) bool, the tokens that count: up to and including the first EOS.
        reveal_steps: (rows, tokens), the forward pass, from 0, that revealed each token; -1 where none did.
        logps, entropies: (rows, tokens) fp32, of the sampler's own distribution in that pass.
        gen_length: length of the canvas.
    """

    prompt_ids: Tensor
    attention_mask: Tensor
    maskable: Tensor
    completion_ids: Tensor
    scored: Tensor
    reveal_steps: Tensor
    logps: Tensor
    entropies: Tensor
    gen_length: int
