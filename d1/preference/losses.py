"""The losses of `METHODS`: functions of ratios, differentiable, one loss per pair or per completion."""

from __future__ import annotations

from collections.abc import Callable

import torch.nn.functional as F
from torch import Tensor

Loss = Callable[[Tensor, Tensor, float], Tensor]


def dpo(ratios: Tensor, signs: Tensor, beta: float) -> Tensor:
    """DPO (arXiv 2305.18290, equation 7): -log sigmoid(beta (chosen ratio - rejected ratio)).

    Args:
        ratios: (2 pairs,), all chosen completions before all rejected ones.
        signs: not read; the order says it.
    """
    chosen, rejected = ratios.chunk(2)
    return -F.logsigmoid(beta * (chosen - rejected))


def kto(ratios: Tensor, signs: Tensor, beta: float) -> Tensor:
    """KTO's value function (arXiv 2402.01306, equation 8), weights of 1: 1 - sigmoid(+-beta ratio), for centred ratios.

    Args:
        ratios: (completions,)
        signs: (completions,), 1 for desirable ones and -1 for others.
    """
    return 1 - (beta * signs * ratios).sigmoid()


LOSSES: dict[str, Loss] = {"dpo": dpo, "kto": kto}
