"""Logits that are not finite: the error, and the search for the first module that made them.

Nothing here runs for a healthy model: a sampler sees in its own log-probabilities and entropies that something is
wrong. Infinite logits count as wrong, -inf for a forbidden token, too, because they make an entropy NaN; no supported
kind of model has them.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any

import torch
from torch import Tensor, nn

from d1.models import head

NEW_COPY = "the model is damaged: download, convert or train it again"


class NotFiniteError(FloatingPointError):
    """A row whose log-probabilities are not finite.

    Attributes:
        number: of the row, in its batch or its stream.
        why: what was found, and what to do.
    """

    def __init__(self, number: int, why: str, name: str | None = None) -> None:
        super().__init__(f"{name or f'row {number}'}: the model's logits are not finite: {why}")
        self.number, self.why = number, why

    def named(self, name: str) -> NotFiniteError:
        """The same error under another name of the row."""
        return NotFiniteError(self.number, self.why, name)


@torch.no_grad()
def why_not_finite(model: Any, texts: Iterable[Tensor]) -> str:
    """The first module, in the order of execution, whose output is not finite, and what to do about it.

    Args:
        model: from `d1.models.load_model`.
        texts: (length,) ids each, without padding: states of the row, which run again until one shows the fault.
    """
    if any(hasattr(weight, "ds_id") or hasattr(weight, "to_local") for weight in model.parameters()):
        return "which layer is at fault is unknown, because each process holds only a part of the weights"
    for text in texts:
        if found := first_fault(model, text):
            return said(model, *found)
    return "another run of the row gave finite numbers: check the machine's memory"


def first_fault(model: Any, text: Tensor) -> tuple[str, nn.Module] | None:
    """The first module, by name, whose output for a `text` (length,) is not finite."""
    found: list[tuple[str, nn.Module]] = []

    def watch(name: str, module: nn.Module) -> Any:
        def look(module: nn.Module, args: Any, output: Any) -> None:
            if not found and not all(tensor.isfinite().all() for tensor in floats(output)):
                found.append((name, module))

        return module.register_forward_hook(look)

    hooks = [watch(name, module) for name, module in model.named_modules()]
    body, run_head = head.body_and_head(model)
    try:
        states = body(text.unsqueeze(0))[0]
        for some in states.split(max(1, head.CHUNK_ELEMENTS // model.config.vocab_size)):
            logits = run_head(some)
            if found or not logits.isfinite().all():
                return found[0] if found else ("the head", model)
    finally:
        for hook in hooks:
            hook.remove()
    return None


def floats(output: Any) -> Iterator[Tensor]:
    """The floating-point tensors of a module's output."""
    if isinstance(output, Tensor):
        if output.is_floating_point():
            yield output
    elif isinstance(output, dict | list | tuple):
        for part in output.values() if isinstance(output, dict) else output:
            yield from floats(part)


def said(model: Any, name: str, module: nn.Module) -> str:
    """What is wrong with the module `name`, on one line."""
    first = f"the first output that is not comes from {name}"
    for weight_name, weight in module.named_parameters():
        if weight.is_floating_point() and (bad := int((~weight.isfinite()).sum())):
            return f"{first}, whose {weight_name} has {bad} of {weight.numel()} values that are not: {NEW_COPY}"
    if model.dtype == torch.float16:
        return f"{first}, whose weights are finite: float16 overflows there, so load the model in bfloat16 or float32"
    return f"{first}, whose weights are finite: numbers before it are too large for {model.dtype}, so {NEW_COPY}"
