"""Whether a model computes in bf16 on this machine if nothing says so: on a GPU always, on a CPU after a check.

A processor with instructions for bf16 (AMX, AVX-512) runs models of 100 million parameters in half the time or less;
others emulate bf16, and models that fit a processor's cache gain nothing. Training runs in mixed precision: weights,
gradients and optimizer stay in fp32.
"""

from __future__ import annotations

import logging
import platform
from functools import cache
from pathlib import Path
from typing import Any

import torch
from torch import nn

INSTRUCTIONS = ("amx_bf16", "avx512_bf16")  # flags of /proc/cpuinfo
MIN_PARAMETERS = 30_000_000  # below, bf16 saves little time
# bf16 has 8 bits of precision, so that a sum of rounded products is off by about 2^-9 of its size.
MAX_DEVIATION = 0.02

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


def number_of_parameters(config: Any) -> int:
    """The parameters of the model that a config describes, which takes no memory."""
    from d1.models.load import auto_class

    with torch.device("meta"):
        return sum(parameter.numel() for parameter in auto_class(config).from_config(config).parameters())


def cpu_runs_bf16(config: Any) -> bool:
    """Whether a model of this config computes in bf16 on this CPU by default: the processor has instructions for it,
    the model is large enough to gain, and a check gives the numbers of fp64 up to rounding. A log line says what was
    found, if the processor has the instructions."""
    instructions = bf16_instructions()
    if instructions is None or number_of_parameters(config) < MIN_PARAMETERS:
        return False
    deviation = bf16_deviation()
    holds = deviation < MAX_DEVIATION
    precision = "in fp32, because bf16 is not exact enough here"
    if holds:
        precision = "in bf16, mixed with fp32 where sums need it"
    logger.info(
        "This processor has %s. A check of bf16 differs from fp64 by %.2g of the norm (allowed: %.2g): the model runs "
        "%s.",
        instructions,
        deviation,
        MAX_DEVIATION,
        precision,
    )
    return holds
