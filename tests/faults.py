"""What can go wrong around a run, made on purpose: for tests of any room."""

from __future__ import annotations

import shutil
from pathlib import Path

from safetensors import safe_open
from safetensors.torch import save_file

# --- The clock --------------------------------------------------------------------------------------------------------

# --- Files ------------------------------------------------------------------------------------------------------------

# --- Models -----------------------------------------------------------------------------------------------------------


def with_nan(source: Path, folder: Path, weight: str, at: tuple[int, ...] = (), value: float = float("nan")) -> Path:
    """A copy of a model's folder whose `weight` is `value` at the index `at`; (): everywhere."""
    shutil.copytree(source, folder)
    for path in folder.glob("*.safetensors"):
        with safe_open(path, framework="pt") as file:
            weights, metadata = {name: file.get_tensor(name) for name in file.keys()}, file.metadata()  # noqa: SIM118
        if weight in weights:
            weights[weight][at if at else ...] = value
            save_file(weights, path, metadata=metadata)
            return folder
    raise KeyError(f"{source} has no weight {weight}")


# --- Servers ----------------------------------------------------------------------------------------------------------

# --- The sandbox ------------------------------------------------------------------------------------------------------
