"""The forward process: which tokens are hidden.

Every draw takes an explicit generator, whose key says what it is for; nothing touches the global random state of
Python, NumPy or PyTorch.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch
from torch import BoolTensor, Generator, Tensor

NOISE_EPS = 1e-3  # eps, the smallest masking probability: keeps the weight 1/t' of the loss finite (LLaDA)


def token_ids(ids: Any) -> Tensor:
    """Token ids as an int64 tensor. uint16 arrays, as in tokenised files, cannot hold a mask token above 65535, and
    PyTorch lacks operations for them. ValueError for numbers that are no integers."""
    tensor = torch.as_tensor(ids)
    if tensor.is_floating_point() or tensor.is_complex() or tensor.dtype == torch.bool:
        raise ValueError(f"token ids must be integers, got {tensor.dtype}")
    return tensor.long()


def keyed_generator(*key: int, device: torch.device | str = "cpu") -> Generator:
    """A generator on `device` that depends only on `key`, e.g. (seed, rank, step); ValueError for a negative part.

    Keys of up to four parts that differ only by zeros at the end, such as (1, 2) and (1, 2, 0), give the same
    generator: keys for different purposes need the same number of parts, or different last parts.
    """
    if any(part < 0 for part in key):
        raise ValueError(f"the parts of a generator's key must be >= 0, got {key}")
    # SeedSequence mixes the parts, so neighbouring keys such as (0, 1) and (1, 0) give unrelated streams.
    state = int(np.random.SeedSequence(key).generate_state(1, np.uint64)[0])
    return Generator(device).manual_seed(state >> 1)


def noise_level(t: Tensor) -> Tensor:
    """Masking probability t' = (1 - eps) t + eps at time t in [0, 1] (LLaDA, arXiv 2502.09992, section 2.1)."""
    return (1 - NOISE_EPS) * t + NOISE_EPS


def draw_mask(maskable: Tensor, p: float | Tensor, generator: Generator, *, mirror: bool = False) -> BoolTensor:
    """Hide each token of `maskable` (bool, any shape) independently with probability `p` (broadcast to its shape).

    One uniform number u is drawn for each maskable token and for no other, so padding never shifts the stream.
    `mirror` uses 1 - u instead of u: the same distribution, the opposite draw.
    """
    maskable = maskable.bool()
    numbers = torch.rand(int(maskable.sum()), generator=generator)
    if mirror:
        numbers = 1 - numbers
    uniform = torch.ones(maskable.shape).masked_scatter_(maskable.cpu(), numbers)
    probability = p.cpu() if isinstance(p, Tensor) else p
    return (uniform < probability).to(maskable.device) & maskable  # type: ignore[return-value]


def draw_masks(maskable: Tensor, p: float | Tensor, generators: Sequence[Generator]) -> Tensor:
    """`draw_mask` of each row of `maskable` (rows, tokens) with its own generator and, if `p` is (rows,), its own p."""
    probabilities = p.cpu() if isinstance(p, Tensor) else [p] * len(maskable)
    masks: list[Tensor] = []
    for row, probability, generator in zip(maskable.cpu(), probabilities, generators, strict=True):
        masks.append(draw_mask(row, probability, generator))
    return torch.stack(masks).to(maskable.device, non_blocking=True)


def draw_noise(
    maskable: Tensor,
    generator: Generator,
    *,
    low: float = 0.0,
    high: float = 1.0,
    mirror: bool = False,
    block_size: int | None = None,
    origin: int = 0,
    level: Callable[[Tensor], Tensor] = noise_level,
) -> tuple[Tensor, BoolTensor]:
    """Time and mask of one training row: t ~ U(low, high), then each token is hidden with probability t' (LLaDA).

    Args:
        maskable: (tokens,) bool, the tokens that may be hidden: those of the answer, never of the prompt.
        low, high: the part of [0, 1] from which t is drawn. If they are equal, t is that number, as in an evaluation,
            and the same random numbers are drawn.
        mirror: the antithetic counterpart of the draw from an equal generator: t -> 1 - t and u -> 1 - u. With
            the level of LLaDA, the two masks together cover every token, and a token is in both with probability
            `NOISE_EPS`.
        block_size: tokens per block of a block-causal model, where each block has its own time (BD3-LM, arXiv
            2503.09573, section 3.1). None: one time for all tokens.
        origin: a token with which a block begins.
        level: the masking probability at times t.

    Returns:
        t (scalar or, with a `block_size`, (tokens,), the time of each token) and the mask (tokens,) bool.
    """
    if block_size is None:
        drawn = torch.rand((), generator=generator)
    else:  # one per block with a token of `maskable`, so neither padding nor a longer prompt shifts the stream
        block = (torch.arange(len(maskable)) + -origin % block_size) // block_size
        noised = block[maskable.cpu()].unique()
        drawn = torch.zeros(len(maskable) + 1)
        drawn[noised] = torch.rand(len(noised), generator=generator)
        drawn = drawn[block]
    t = low + (high - low) * drawn
    if mirror:
        t = 1 - t
    return t, draw_mask(maskable, level(t), generator, mirror=mirror)
