"""The reverse process: prompt -> completion, block by block (LLaDA, arXiv 2502.09992, section 2.4 and appendix B).

A canvas of `gen_length` mask tokens follows the prompt. Blocks are filled left to right; in each step the model
predicts every masked token of the current block and the most confident predictions are revealed.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Generator, Tensor

from d1.models import body_and_head

REMASKING = ("low_confidence", "random")


def spread(total: int, parts: int) -> list[int]:
    """Splits `total` into `parts` sizes that differ by at most one, the larger ones first; nothing is dropped."""
    size, remainder = divmod(total, parts)
    return [size + (part < remainder) for part in range(parts)]


def reveal_schedule(gen_length: int, block_length: int, steps: int) -> list[list[int]]:
    """Tokens revealed in each step of each block: one list a block, summing to the block's length.

    Raises:
        ValueError: a length is not positive, there are fewer steps than blocks, or more steps than tokens.
    """
    if min(gen_length, block_length, steps) < 1:
        raise ValueError(
            f"gen_length, block_length and steps must be positive, got {gen_length}, {block_length} and {steps}"
        )
    num_blocks = -(-gen_length // block_length)
    if not num_blocks <= steps <= gen_length:
        raise ValueError(
            f"{gen_length} tokens in {num_blocks} blocks need between {num_blocks} and {gen_length} steps, got {steps}"
        )
    return [
        spread(tokens, block_steps)
        for tokens, block_steps in zip(spread(gen_length, num_blocks), spread(steps, num_blocks), strict=True)
    ]


def uniform(shape: Sequence[int], generator: Generator | Sequence[Generator] | None, like: Tensor) -> Tensor:
    """Uniform numbers in [0, 1) of `like`'s dtype on its device; a list of generators gives each row its own."""
    if generator is None or isinstance(generator, Generator):
        device = like.device if generator is None else generator.device
        return torch.rand(*shape, generator=generator, device=device, dtype=like.dtype).to(like.device)
    rows = [torch.rand(*shape[1:], generator=row, device=row.device, dtype=like.dtype) for row in generator]
    return torch.stack(rows).to(like.device)


def sample_tokens(
    logits: Tensor,
    temperature: float,
    generator: Generator | Sequence[Generator] | None = None,
    noise_dtype: torch.dtype = torch.float32,
) -> Tensor:
    """argmax(logits + temperature * Gumbel noise): a draw from softmax(logits / temperature); argmax at 0.

    Args:
        logits: (rows, positions, vocab).
        noise_dtype: float32 or float64. Lower precision truncates the noise's tail and sharpens the distribution
            (arXiv 2409.02908), so it is refused.
    """
    if noise_dtype not in (torch.float32, torch.float64):
        raise ValueError(f"Gumbel noise must be drawn in float32 or float64, got {noise_dtype}")
    if temperature == 0:
        return logits.argmax(-1)
    logits = logits.to(noise_dtype)
    # torch.rand is a multiple of eps/2, zero included; half of one grid cell stands for zero, where the log diverges.
    grid = torch.finfo(noise_dtype).eps / 2
    exponential = -torch.log1p(-uniform(logits.shape, generator, logits).clamp(min=grid / 2))
    return (logits - temperature * exponential.log()).argmax(-1)


def logits_at(model: Any, ids: Tensor, attention_mask: Tensor, positions: Tensor) -> Tensor:
    """fp32 logits (rows, n, vocab) at each row's own `positions` (rows, n); the head runs nowhere else."""
    body, head = body_and_head(model)
    states = body(ids, attention_mask)
    return head(states.gather(1, positions.unsqueeze(-1).expand(-1, -1, states.shape[-1]))).float()


def guided_logits(
    model: Any,
    ids: Tensor,
    attention_mask: Tensor,
    positions: Tensor,
    prompt: Tensor,
    mask_token_id: int,
    cfg_scale: float,
) -> Tensor:
    """`logits_at` with classifier-free guidance: un + (scale + 1) (cond - un), `un` with the `prompt` masked."""
    if cfg_scale == 0:
        return logits_at(model, ids, attention_mask, positions)
    both = torch.cat([ids, ids.masked_fill(prompt, mask_token_id)])
    cond, un = logits_at(model, both, attention_mask.repeat(2, 1), positions.repeat(2, 1)).chunk(2)
    return un + (cfg_scale + 1) * (cond - un)


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
    generator: Generator | Sequence[Generator] | None = None,
    noise_dtype: torch.dtype = torch.float32,
) -> Tensor:
    """Block-wise masked diffusion sampling.

    Args:
        model: from `d1.models.load_model`, in eval mode.
        prompt_ids: (rows, prompt) ids, padded on the left.
        attention_mask: (rows, prompt), 1 at real tokens. Padding is invisible: a greedy row is the same in any batch.
        gen_length: tokens to generate. Blocks and steps that do not divide it are spread evenly, none dropped.
        block_length: the longest a block may be; `gen_length` gives pure diffusion.
        steps: forward passes over the whole canvas (twice as many sequences with guidance).
        temperature: of the Gumbel noise; 0 is greedy.
        cfg_scale: 0 turns guidance off.
        remasking: which predictions are kept: the most likely ones ("low_confidence"), or "random" ones.
        generator: one for the batch, or one a row, which makes a row's draws independent of its batch.

    Returns:
        (rows, prompt + gen_length) ids without a mask token in the completion.

    Raises:
        ValueError: an argument that makes no sense, before the first forward pass.
    """
    if remasking not in REMASKING:
        raise ValueError(f"remasking must be one of {', '.join(REMASKING)}, got {remasking!r}")
    if temperature < 0 or cfg_scale < 0:
        raise ValueError(f"temperature and cfg_scale must be >= 0, got {temperature} and {cfg_scale}")
    schedule = reveal_schedule(gen_length, block_length, steps)
    rows, prompt_length = prompt_ids.shape
    if isinstance(generator, Sequence) and len(generator) != rows:
        raise ValueError(f"generate needs one generator a row: {len(generator)} for {rows} rows")

    canvas = prompt_ids.new_full((rows, gen_length), mask_token_id)
    ids = torch.cat([prompt_ids, canvas], dim=1)
    visible = torch.cat([attention_mask, attention_mask.new_ones(rows, gen_length)], dim=1)
    prompt = torch.cat([attention_mask.bool(), torch.zeros_like(canvas, dtype=torch.bool)], dim=1)

    start = prompt_length
    for reveals in schedule:
        end = start + sum(reveals)
        hidden = torch.arange(start, end, device=ids.device).expand(rows, -1)  # each row's masked positions, ascending
        for count in reveals:
            logits = guided_logits(model, ids, visible, hidden, prompt, mask_token_id, cfg_scale)
            log_normaliser = logits.logsumexp(-1)
            logits[..., mask_token_id] = -torch.inf  # a revealed token must be a token
            tokens = sample_tokens(logits, temperature, generator, noise_dtype)
            if remasking == "low_confidence":
                confidence = logits.gather(-1, tokens.unsqueeze(-1)).squeeze(-1) - log_normaliser
            else:
                confidence = uniform(tokens.shape, generator, logits)
            # A stable sort breaks ties to the left whatever the batch; saturated confidences do tie.
            order = confidence.argsort(dim=-1, descending=True, stable=True)
            chosen = order[:, :count]
            ids.scatter_(1, hidden.gather(1, chosen), tokens.gather(1, chosen))
            hidden = hidden.gather(1, order[:, count:].sort(-1).values)
        start = end
    return ids
