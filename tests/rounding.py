"""How far two computations of the same numbers may be apart if they differ by rounding only, on any processor.

A kernel adds the terms of a dot product in an order of its own. The order depends on the instruction set of the
processor, on the library, and on the shape of a batch. So a tolerance that was read off one machine fails on another;
here it follows from the dtype, the number of terms and the scale of the values.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

LOGITS = (
    8.0  # the largest logit of a tiny model in tests/d1 is below this, and so is the error's scale of its log-probs
)
ROUNDINGS = 32  # dot products that follow each other in a tiny model: about 10 in each of 3 layers
TERMS = 64  # of a dot product in a tiny model: the widest layer
TOKENS = 256  # of a tiny batch: the terms of the sums in a gradient


def rounding(scale: float, terms: int = TERMS, dtype: torch.dtype = torch.float32) -> float:
    """The largest difference to be expected between two results that both come from `ROUNDINGS` sums in a row.

    A sum of n terms, in any order, is off by less than c sqrt(n) u scale with a probability of at least
    1 - 2 exp(-c^2 / 2), where u = eps / 2 (Higham and Mary, A New Approach to Probabilistic Rounding Error Analysis,
    SIAM J. Sci. Comput. 41(5), 2019). Errors of sums that follow each other are independent, so their squares add up,
    over both results: c sqrt(n) u scale sqrt(2 ROUNDINGS), which is 8 sqrt(n) eps scale with c = 2.

    Args:
        scale: the largest value of the numbers that are compared, or of those that they are computed from.
        terms: of a sum; n above.
        dtype: of the sums, not of the result: the norms of Transformers compute in fp32 in an fp64 model, too.
    """
    per_sum = 2.0 * terms**0.5 * torch.finfo(dtype).eps / 2
    return per_sum * (2 * ROUNDINGS) ** 0.5 * scale


def largest(values: Tensor | Sequence[Tensor]) -> float:
    """The largest absolute value that is finite; 0 if there is none."""
    tensors = [values] if isinstance(values, Tensor) else values
    sizes = [tensor.detach().abs()[tensor.detach().isfinite()] for tensor in tensors]
    return max((float(finite.max()) for finite in sizes if finite.numel()), default=0.0)


def assert_near(
    found: Tensor | Sequence[Tensor],
    expected: Tensor | Sequence[Tensor],
    *,
    least: float = 0.0,
    terms: int = TERMS,
    **options: Any,
) -> None:
    """Compares two results of different kernels, or of batches of different shapes.

    Args:
        least: the smallest scale of `rounding`: log-probabilities near 0 come from logits that are larger.
        options: of `torch.testing.assert_close`.
    """
    atol = rounding(max(largest(expected), least), terms)
    torch.testing.assert_close(found, expected, rtol=0, atol=atol, **options)
