"""Values that the files of several methods share. Needs no torch."""

from __future__ import annotations

from typing import Any

from d1.rl.methods.d1 import D1, D1_OPTIMIZER
from d1.rl.methods.entry import Method, Page, Trained

# A constant rate, with the optimizer's own defaults
CONSTANT: dict[str, Any] = dict(lr_scheduler_type="constant", warmup_steps=0, weight_decay=0.0, adam_beta2=0.999)
# For entries of this library: the Trainer's defaults
LINEAR: dict[str, Any] = CONSTANT | dict(lr_scheduler_type="linear")
# One token at least in each step, as many as have more than this probability: Fast-dLLM's rule
THRESHOLD: dict[str, Any] = dict(sampler="parallel", reveal="threshold", diffusion_steps=None)


def method(
    paper: str, scale: dict[str, Any], trained: Trained | None = None, page: Page | None = None, **values: Any
) -> Method:
    """An entry: d1's values and optimizer, except for what is given here."""
    return Method(paper, D1 | values, D1_OPTIMIZER | scale, trained, page)


def canvas(tokens: int, steps: int, block: int) -> dict[str, int]:
    """The settings of a canvas of `tokens` tokens."""
    return {"max_completion_length": tokens, "diffusion_steps": steps, "block_length": block}
