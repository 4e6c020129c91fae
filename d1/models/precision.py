"""Whether a model computes in bf16 on this machine if nothing says so: on a GPU always, on a CPU after a check.

A processor whose instructions for bf16 are fast (AMX; AVX-512 on some) runs models of 100 million parameters in half
the time or less. Others emulate bf16, or have the instructions and multiply at half the speed of fp32 with them; and
models that fit a processor's cache gain nothing. Training runs in mixed precision: weights, gradients and optimizer
stay in fp32.
"""

from __future__ import annotations

import logging
import platform
import time
from functools import cache
from pathlib import Path
from typing import Any

import torch
from torch import nn

INSTRUCTIONS = ("amx_bf16", "avx512_bf16")  # flags of /proc/cpuinfo
MIN_PARAMETERS = 30_000_000  # below, bf16 saves little time
# bf16 has 8 bits of precision, so that a sum of rounded products is off by about 2^-9 of its size.
MAX_DEVIATION = 0.02
# `bf16_speedup()` is 0.53 on an Emerald Rapids whose AMX is off. With AMX, a model of 135M parameters runs 2 to 2.7
# times as fast. The bound is far from both, so a slow moment of the machine changes no answer.
MIN_SPEEDUP = 1.2

logger = logging.getLogger(__name__)


def bf16_instructions(cpuinfo: Path = Path("/proc/cpuinfo")) -> str | None:
    """The name of the processor's instructions for products in bf16; None if it has none or is not known."""
    if platform.system() != "Linux" or not cpuinfo.is_file():
        return None
    flags: set[str] = set()
    for line in cpuinfo.read_text().splitlines():
        if line.startswith("flags"):
            flags.update(line.split())
    return next((name for name in INSTRUCTIONS if name in flags), None)


@cache
def bf16_deviation(width: int = 512, rows: int = 64) -> float:
    """By how much the output and the gradients of a small network differ under autocast to bf16 from those in fp64, as
    a share of their norm: the largest of these shares. Random numbers stay as they are."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        network = nn.Sequential(nn.Linear(width, 3 * width), nn.SiLU(), nn.Linear(3 * width, width))
        inputs = torch.randn(rows, width)

    # The output and the gradients, in fp64 and in bf16
    results: dict[bool, list[torch.Tensor]] = {}
    for exact in (True, False):
        network = network.double() if exact else network.float()
        network.zero_grad()
        with torch.enable_grad(), torch.autocast("cpu", torch.bfloat16, enabled=not exact):
            output = network(inputs.double() if exact else inputs)
        output.double().square().mean().backward()
        gradients = [weight.grad for weight in network.parameters() if weight.grad is not None]
        results[exact] = [tensor.detach().double().clone() for tensor in (output, *gradients)]

    deviations = []
    for in_bf16, in_fp64 in zip(results[False], results[True], strict=True):
        deviations.append(float((in_bf16 - in_fp64).norm() / in_fp64.norm()))
    return max(deviations)


@cache
def bf16_speedup(size: int = 1024, repeats: int = 5) -> float:
    """How many times as fast this processor multiplies two matrices of `size` x `size` in bf16 as in fp32, by the
    shortest of `repeats` times each. It takes about a tenth of a second."""
    fp32 = torch.full((size, size), 0.5)
    bf16 = fp32.bfloat16()
    shortest = {torch.float32: float("inf"), torch.bfloat16: float("inf")}
    for _ in range(repeats + 1):  # the first ones load the kernels
        for matrix in (fp32, bf16):
            started = time.perf_counter()
            torch.nn.functional.linear(matrix, matrix)
            seconds = time.perf_counter() - started
            shortest[matrix.dtype] = min(shortest[matrix.dtype], seconds)
    return shortest[torch.float32] / shortest[torch.bfloat16]


def number_of_parameters(config: Any) -> int:
    """The number of parameters of the model that a config describes; allocates no weights."""
    from d1.models.load import auto_class

    with torch.device("meta"):
        return sum(parameter.numel() for parameter in auto_class(config).from_config(config).parameters())


def why_not_bf16() -> str | None:
    """Why this CPU does not compute in bf16 by default, after a check of its numbers and its speed; None: it does."""
    if bf16_instructions() is None:
        return "this processor has no instructions for bf16"
    if bf16_deviation() >= MAX_DEVIATION:
        return f"its numbers differ from fp64 by {bf16_deviation():.2g} of the norm, more than {MAX_DEVIATION}"
    if bf16_speedup() < MIN_SPEEDUP:
        return f"it multiplies at {bf16_speedup():.2g} times the speed of fp32, less than {MIN_SPEEDUP}"
    return None


def cpu_runs_bf16(config: Any) -> bool:
    """Whether a model of this config computes in bf16 on this CPU by default: the model is large enough to gain, the
    processor has instructions for it, and a check gives the numbers of fp64 up to rounding, faster than in fp32. If
    the model is large enough and the processor has the instructions, a log line gives the result of the check."""
    instructions = bf16_instructions()
    if instructions is None or number_of_parameters(config) < MIN_PARAMETERS:
        return False
    reason = why_not_bf16()
    if reason is None:
        logger.info(
            "This processor has %s. A check of bf16 differs from fp64 by %.2g of the norm (allowed: %.2g), and is %.2g "
            "times as fast as fp32: the model runs in bf16, mixed with fp32 where sums need it.",
            instructions,
            bf16_deviation(),
            MAX_DEVIATION,
            bf16_speedup(),
        )
    else:
        logger.info("This processor has %s, but %s: the model runs in fp32.", instructions, reason)
    return reason is None
