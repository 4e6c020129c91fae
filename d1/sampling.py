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
CHUNK_ELEMENTS = 2**23  # logits alive at once, positions x vocabulary: 34 MB in fp32


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
    exponential = uniform(logits.shape, generator, logits).clamp_(min=grid / 2).neg_().log1p_().neg_()
    return (logits - exponential.log_().mul_(temperature)).argmax(-1)


def predict(
    model: Any,
    ids: Tensor,
    visible: Tensor | None,
    positions: Tensor,
    prompt: Tensor,
    *,
    mask_token_id: int,
    temperature: float,
    cfg_scale: float,
    generator: Generator | Sequence[Generator] | None,
    noise_dtype: torch.dtype,
) -> tuple[Tensor, Tensor]:
    """A token for each row's own `positions` (rows, n) and the token's log-probability, both (rows, n).

    Guidance: logits = un + (scale + 1) (cond - un), `un` with the `prompt` (rows, length) masked. The head runs at
    `positions` only, a bounded number of them at a time. Chunks hold whole rows, or parts of one row that depend on
    nothing else, so that a row's random numbers do not depend on its batch.
    """
    body, head = body_and_head(model)
    views = [ids] if cfg_scale == 0 else [ids, ids.masked_fill(prompt, mask_token_id)]
    rows, n = positions.shape
    everywhere = None if visible is None else visible.repeat(len(views), 1)
    states = body(torch.cat(views), everywhere, positions.repeat(len(views), 1)).unflatten(0, (len(views), rows))
    at_once = max(1, CHUNK_ELEMENTS // model.config.vocab_size)
    rows_at_once = max(1, at_once // n)
    tokens, logps = torch.empty_like(positions), torch.empty(rows, n, device=ids.device)
    for first in range(0, rows, rows_at_once):
        some = slice(first, first + rows_at_once)
        generators = generator[some] if isinstance(generator, Sequence) else generator
        for start in range(0, n, at_once):
            part = some, slice(start, start + at_once)
            logits = head(states[:, *part].flatten(0, 1)).float().unflatten(0, (len(views), -1))
            logits = logits[0] if cfg_scale == 0 else logits[1] + (cfg_scale + 1) * (logits[0] - logits[1])
            log_normaliser = logits.logsumexp(-1)
            logits[..., mask_token_id] = -torch.inf  # a revealed token must be a token
            tokens[part] = sample_tokens(logits, temperature, generators, noise_dtype)
            logps[part] = logits.gather(-1, tokens[part].unsqueeze(-1)).squeeze(-1) - log_normaliser
    return tokens, logps


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
    eos_token_ids: Sequence[int] | None = None,
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
        eos_token_ids: EOS stop: a row whose finished blocks hold one of these leaves the batch, its later blocks filled
            with the first of them. Changes no token up to a row's first EOS. Random draws then need one generator a
            row, or the rows that stay would get other numbers.

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
    draws = temperature > 0 or remasking == "random"
    if eos_token_ids is not None and draws and not isinstance(generator, Sequence):
        raise ValueError("eos_token_ids with random draws needs a list of generators, one a row")

    canvas = prompt_ids.new_full((rows, gen_length), mask_token_id)
    ids = torch.cat([prompt_ids, canvas], dim=1)
    result = ids.clone()
    visible = torch.cat([attention_mask, attention_mask.new_ones(rows, gen_length)], dim=1)
    prompt = torch.cat([attention_mask.bool(), torch.zeros_like(canvas, dtype=torch.bool)], dim=1)
    # Transformers asks the device in every forward pass whether a mask hides anything; without a mask it does not ask.
    padded = not attention_mask.all()
    alive = torch.arange(rows, device=ids.device)

    start = prompt_length
    for reveals in schedule:
        end = start + sum(reveals)
        # Each row's masked positions, ascending.
        hidden = torch.arange(start, end, device=ids.device).expand(len(ids), -1)
        for count in reveals:
            tokens, confidence = predict(
                model,
                ids,
                visible if padded else None,
                hidden,
                prompt,
                mask_token_id=mask_token_id,
                temperature=temperature,
                cfg_scale=cfg_scale,
                generator=generator,
                noise_dtype=noise_dtype,
            )
            if remasking == "random":
                confidence = uniform(tokens.shape, generator, confidence)
            # A stable sort breaks ties to the left whatever the batch; saturated confidences do tie.
            order = confidence.argsort(dim=-1, descending=True, stable=True)
            chosen = order[:, :count]
            ids.scatter_(1, hidden.gather(1, chosen), tokens.gather(1, chosen))
            hidden = hidden.gather(1, order[:, count:].sort(-1).values)
        start = end
        if eos_token_ids is not None and end < result.shape[1]:
            ended = torch.isin(ids[:, prompt_length:end], ids.new_tensor(eos_token_ids)).any(1)
            stay = [row for row, done in enumerate(ended.tolist()) if not done]  # the block's one host sync
            if len(stay) < len(ids):
                ids[:, end:] = ids[:, end:].masked_fill(ended.unsqueeze(1), eos_token_ids[0])
                result[alive] = ids
                if not stay:
                    return result
                alive, ids, visible, prompt = alive[stay], ids[stay], visible[stay], prompt[stay]
                generator = [generator[row] for row in stay] if isinstance(generator, Sequence) else generator
    result[alive] = ids
    return result
