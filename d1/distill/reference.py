"""The trained weights as they were at an earlier step, which take the model's place for a pass: no second model."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from d1.runs.checkpoints import reading
from d1.runs.trainer import own_part


def trained_weights(model: Any) -> dict[str, Any]:
    return {name: weight for name, weight in model.named_parameters() if weight.requires_grad}


def trained_parts(model: Any) -> dict[str, Tensor]:
    """The trained weights, by name; of split ones this process's part."""
    return {name: own_part(weight).detach() for name, weight in trained_weights(model).items()}


def forget_whole(weight: Any) -> None:
    """Make ZeRO-3 (DeepSpeed 0.19), which keeps small weights whole, put them together from their parts again."""
    if hasattr(weight, "ds_status") and weight.ds_status.name == "AVAILABLE":
        weight.partition()


class Reference:
    """A copy of the trained weights: with LoRA of the adapter alone."""

    def __init__(self, model: Any) -> None:
        self.model = model
        self.weights = {name: part.clone() for name, part in trained_parts(model).items()}

    @contextlib.contextmanager
    def in_place(self) -> Iterator[Any]:
        """The model with the copied weights; afterwards it has its own again."""
        self.exchange()
        try:
            yield self.model
        finally:
            self.exchange()

    @torch.no_grad()
    def exchange(self) -> None:
        for name, part in trained_parts(self.model).items():
            own = part.clone()
            part.copy_(self.weights[name])
            self.weights[name] = own
        for weight in trained_weights(self.model).values():
            forget_whole(weight)

    def is_split(self) -> bool:
        """Whether each process holds only a part."""
        return any(own_part(weight) is not weight for weight in self.model.parameters())

    def file(self, folder: Path, process: int) -> Path:
        return folder / (f"reference_rank{process}.safetensors" if self.is_split() else "reference.safetensors")

    def save(self, folder: Path, process: int) -> None:
        """To be called on every process."""
        if process == 0 or self.is_split():
            save_file({name: part.contiguous() for name, part in self.weights.items()}, self.file(folder, process))

    def load(self, folder: Path, process: int) -> None:
        """Raises ValueError if the file is missing or damaged, or of another number of processes."""
        path = self.file(folder, process)
        with reading(path):
            found = load_file(path)
            for name, part in self.weights.items():
                part.copy_(found[name])
