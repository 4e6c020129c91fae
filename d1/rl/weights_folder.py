"""The folder through which a run's weights reach its servers: on a RAM disk where there is one with room."""

from __future__ import annotations

import hashlib
import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from d1.models.convert import write_weights
from d1.serve.weights import RAM_DISK, has_room


class WeightsFolder:
    """Holds one version at a time, in a folder of its own.

    Attributes:
        path: the folder; None until the first version is written.
    """

    def __init__(self, output_dir: Path, part: str = "") -> None:
        """`part` ends the name, of one of several folders of a run."""
        self.output_dir, self.path, self.part = output_dir.resolve(), Path(), part

    def write(
        self,
        model: Any,
        version: str,
        folders: Sequence[Sequence[str] | None],
        released: bool = False,
        copy: Path | None = None,
    ) -> None:
        """Replaces what is there by the weights of `model`, or its adapter, or by those of its kind in the folder
        `copy`. `folders` are those that each server reads, None for a server that reads all. `released`: whole weights,
        with the adapter folded in, in the format that they were released in, for an engine."""
        if self.path == Path():
            whole = released or not is_adapted(model)
            weights = [weight for weight in model.parameters() if weight.requires_grad or whole]
            size = sum(weight.numel() * weight.element_size() for weight in weights)
            # The name is a function of the run, so that a resume removes what a killed run left.
            name = "d1-weights-" + hashlib.sha256(str(self.output_dir).encode()).hexdigest()[:12] + self.part
            self.path = place(self.output_dir, folders, size) / name
        shutil.rmtree(self.path, ignore_errors=True)
        self.path.mkdir(mode=0o700)  # fails if it is someone else's
        if copy is not None:
            shutil.copytree(copy, self.path / version)
        elif released:
            write_weights(model, self.path / version)
        else:
            model.save_pretrained(self.path / version)

    def remove(self) -> None:
        """Removes what this process wrote."""
        if self.path != Path():
            shutil.rmtree(self.path, ignore_errors=True)
            self.path = Path()


def is_adapted(model: Any) -> bool:
    return hasattr(model, "peft_config")


def place(output_dir: Path, folders: Sequence[Sequence[str] | None], size: int) -> Path:
    """The folder for weights of `size` bytes: the RAM disk, else the run's own, else one that the servers name.

    Raises:
        ValueError: there is no folder that all servers read and that has room.
    """
    named = [Path(folder) for readable in folders for folder in readable or ()]
    output_dir.mkdir(parents=True, exist_ok=True)

    def suits(folder: Path) -> bool:
        read = all(own is None or any(folder.is_relative_to(one) for one in own) for own in folders)
        return read and has_room(folder, size)

    for folder in (RAM_DISK, output_dir, *named):
        if suits(folder):
            return folder
    raise ValueError(
        f"the servers read weights below {', '.join(map(str, dict.fromkeys(named)))}, and none of these folders is one "
        f"that all of them name, that this run can write to, and that has {size / 1e9:.1f} GB of room: start them with "
        "a --weights_dir that is"
    )
