"""The published algorithms, rewritten: the reference for speed, memory and exactness.

Sampling (LLaDA, arXiv 2502.09992, appendix B, as in d1): every step computes the logits of every position, adds noise
to all of them, normalises them over the vocabulary, and picks the most confident tokens row by row. Scoring (d1, arXiv
2504.12216, section 3): all mu masked prompts of a batch go through the model at once, the logits of every position are
computed and kept, and those of the completion are normalised together.

Three differences from d1 make the outputs comparable: padding is masked out, remainders of blocks and steps are
distributed instead of dropped, and the mask token is never revealed.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from d1.sampling.reveal import reveal_schedule


def add_gumbel_noise(logits: Tensor, temperature: float, uniforms: Tensor) -> Tensor:
    """exp(logits) / (-log u)^temperature: its argmax is a draw from softmax(logits / temperature)."""
    return logits.exp() / (-uniforms.log()) ** temperature


@torch.no_grad()
def generate(
    model: Any,
    prompt_ids: Tensor,
    attention_mask: Tensor,
    *,
    mask_token_id: int,
    gen_length: int,
    block_length: int,
    steps: int,
    temperature: float = 0.0,
    cfg_scale: float = 0.0,
    remasking: str = "low_confidence",
    rand: Callable[[Tensor, tuple[int, ...]], Tensor] | None = None,
    dtype: torch.dtype | None = None,
) -> Tensor:
    """Ids (rows, prompt + gen_length); arguments as in `d1.sampling.generate`.

    Args:
        rand: `rand(hidden, shape)` returns uniform numbers of that shape for a canvas whose masked positions in the
            current block are `hidden` (rows, length); by default from the global random state.
        dtype: dtype of noise and softmax; by default that of the logits, as in d1's rollouts.
    """
    rows, prompt_length = prompt_ids.shape
    canvas = prompt_ids.new_full((rows, gen_length), mask_token_id)
    x = torch.cat([prompt_ids, canvas], dim=1)
    # d1 has no mask; without padding it is left out here too, because Transformers would check it in every step.
    visible = None if attention_mask.all() else torch.cat([attention_mask, torch.ones_like(canvas)], dim=1)
    is_prompt = torch.cat([attention_mask, torch.zeros_like(canvas)], dim=1).bool()
    twice = None if visible is None else visible.repeat(2, 1)
    draw = rand or (lambda _, shape: torch.rand(shape, dtype=dtype or model.dtype, device=x.device))
    end = prompt_length
    for reveals in reveal_schedule(gen_length, block_length, steps):
        end += sum(reveals)
        for count in reveals:
            hidden = x == mask_token_id
            if cfg_scale > 0:
                both = torch.cat([x, torch.where(is_prompt, mask_token_id, x)])
                logits, un = model(input_ids=both, attention_mask=twice).logits.chunk(2)
                logits = un + (cfg_scale + 1) * (logits - un)
            else:
                logits = model(input_ids=x, attention_mask=visible).logits
            logits = logits.to(dtype or logits.dtype)
            in_block = hidden.clone()
            in_block[:, end:] = False
            noised = logits if temperature == 0 else add_gumbel_noise(logits, temperature, draw(in_block, logits.shape))
            of_mask = noised[..., mask_token_id].clone()
            noised[..., mask_token_id] = -torch.inf
            x0 = noised.argmax(-1)
            noised[..., mask_token_id] = of_mask
            if remasking == "low_confidence":
                confidence = F.softmax(logits, dim=-1).gather(-1, x0.unsqueeze(-1)).squeeze(-1)
            else:
                confidence = draw(in_block, x0.shape)
            x0 = torch.where(hidden, x0, x)
            confidence = torch.where(in_block, confidence, -torch.inf)
            transfer = torch.zeros_like(hidden)
            for row in range(rows):
                transfer[row, confidence[row].topk(count).indices] = True
            x[transfer] = x0[transfer]
            del logits, noised  # before the next forward pass
    return x


def score(
    model: Any,
    prompt_ids: Tensor,
    attention_mask: Tensor,
    completion_ids: Tensor,
    prompt_noise: Tensor,
    mask_token_id: int,
) -> Tensor:
    """Log-probs (rows, mu, completion) under all mu masks `prompt_noise` (rows, mu, prompt), in one forward pass."""
    rows, mu, prompt_length = prompt_noise.shape
    noised = torch.where(prompt_noise, mask_token_id, prompt_ids.unsqueeze(1)).flatten(0, 1)
    targets = completion_ids.repeat_interleave(mu, dim=0)
    canvas = torch.full_like(targets, mask_token_id)
    mask = attention_mask.repeat_interleave(mu, dim=0)
    visible = None if mask.all() else torch.cat([mask, torch.ones_like(canvas)], dim=1)
    logits = model(input_ids=torch.cat([noised, canvas], dim=1), attention_mask=visible).logits
    logits = logits[:, prompt_length:]
    loss = F.cross_entropy(logits.reshape(-1, logits.shape[-1]), targets.flatten(), reduction="none")
    return -loss.float().view(rows, mu, -1)
