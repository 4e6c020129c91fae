"""A second model for sampling, whose weights have the LoRA adapter of a model that is trained folded in.

An adapter on all linear layers adds two products, a sum and a scaling to each of them. Folded into 16-bit weights, it
is rounded once more; the logits are as near to those in fp32 as without folding. PEFT can fold an adapter in place, but
then subtracts it again, which does not give back the bits of 16-bit weights. So a copy is merged, and the weights that
are trained stay as they are.
"""

from __future__ import annotations

import copy
from collections import Counter
from collections.abc import Mapping
from typing import Any

import torch
from peft import PeftModel
from peft.tuners import lora
from peft.tuners.tuners_utils import BaseTunerLayer
from peft.utils.other import AuxiliaryTrainingWrapper
from torch import nn

QUANTISED = (torch.uint8, torch.int8)  # dtypes of weights that are stored in 4 or 8 bits


class MergedCopy:
    """A model without an adapter that computes what a `PeftModel` does.

    The weights that the adapter changes take memory of their own; all others, and the buffers, are shared with the
    trained model.

    Attributes:
        model: in eval mode, with the weights of the last `refresh`; before the first one, without the adapter.

    Raises:
        ValueError: the adapter cannot be folded into a copy (`why_not_mergeable`).
    """

    def __init__(self, trained: PeftModel) -> None:
        reason = why_not_mergeable(trained)
        if reason is not None:
            raise ValueError(reason)
        base = trained.get_base_model()
        layers = adapted_layers(base)
        copied = adapted_weights(layers)
        # What `deepcopy` takes for copied already is shared.
        shared: dict[int, Any] = {}
        for tensor in (*base.parameters(), *base.buffers()):
            if id(tensor) not in copied:
                shared[id(tensor)] = tensor
        self.model: Any = copy.deepcopy(base, shared).eval()
        # Pairs of a layer and its copy, which has the same adapter on the copied weights. The model itself gets the
        # layer below, so that it has no adapter.
        twins: dict[str, Any] = {name: self.model.get_submodule(name) for name in layers}
        self.layers: list[tuple[Any, Any]] = [(layer, twins[name]) for name, layer in layers.items()]
        for name, twin in twins.items():
            self.model.set_submodule(name, twin.get_base_layer())

    @torch.no_grad()
    def refresh(self) -> None:
        """Take over the present weights of the trained model and of its active adapters."""
        for layer, twin in self.layers:
            for weight, copied in zip(base_weights(layer), base_weights(twin), strict=True):
                copied.copy_(weight)
            twin.merged_adapters.clear()
            twin.merge(adapter_names=layer.active_adapters)


def adapted_layers(base: nn.Module) -> dict[str, Any]:
    """The LoRA layers of a model by name, those of shared modules by each of their names."""
    modules = base.named_modules(remove_duplicate=False)
    return {name: module for name, module in modules if isinstance(module, BaseTunerLayer)}


def base_weights(layer: Any) -> list[nn.Parameter]:
    """The weight and the bias below an adapter."""
    return list(layer.get_base_layer().parameters(recurse=False))


def adapted_weights(layers: Mapping[str, Any]) -> dict[int, nn.Parameter]:
    """The weights below the adapters of these layers, each once, by their id."""
    weights = {}
    for layer in layers.values():
        for weight in base_weights(layer):
            weights[id(weight)] = weight
    return weights


def copied_bytes(model: nn.Module) -> int:
    """Bytes of the weights that a `MergedCopy` does not share."""
    return sum(weight.nbytes for weight in adapted_weights(adapted_layers(model)).values())


def why_not_mergeable(model: Any) -> str | None:
    """Why no `MergedCopy` can be made of a model; None if it can."""
    if not isinstance(model, PeftModel):
        return "the model has no adapter to merge"
    base = model.get_base_model()
    layers = adapted_layers(base)
    weights = adapted_weights(layers)
    if any(weight.dtype in QUANTISED for weight in weights.values()):
        return "4-bit weights cannot absorb an adapter"
    if any(isinstance(module, AuxiliaryTrainingWrapper) for module in base.modules()):
        return "the adapter trains whole modules or single tokens (modules_to_save, trainable_token_indices)"
    unsupported = {type(layer).__name__ for layer in layers.values() if not isinstance(layer, lora.Linear)}
    if unsupported:
        return f"the adapter has layers that are not LoRA on a linear layer: {', '.join(sorted(unsupported))}"
    holders: Counter[int] = Counter()  # modules per weight
    for module in base.modules():
        holders.update(id(weight) for weight in module.parameters(recurse=False))
    if any(holders[weight_id] > 1 for weight_id in weights):
        return "the adapter is on weights that another module shares"
    return None
