"""Stops a run whose loss or weights are no longer finite, and says where."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch


def bad_loss(
    loss: float, rows: list[dict[str, Any]], output_dir: str | Path, step: int, rank: int
) -> FloatingPointError:
    """Writes the rows of a loss that is not finite to a JSON file of `output_dir`; returns the error to raise.

    Args:
        loss: NaN or infinite.
        rows: what is known of each row to blame.
        step, rank: the optimizer step and the process, which the file is named after.
    """
    path = Path(output_dir) / f"bad_loss_step{step}_rank{rank}.json"
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(rows, indent=1))
    return FloatingPointError(
        f"the loss became {loss} at step {step}; its rows are in {path}. Lower the learning rate, or look there for "
        "what is special about them."
    )


def check_weights(model: Any, step: int) -> None:
    """Refuse trained weights that are not finite, before they are saved.

    Of weights that are split over processes, each process looks at its own part.

    Raises:
        FloatingPointError: names the first such weight.
    """
    for name, weight in model.named_parameters():
        part = getattr(weight, "ds_tensor", weight)  # DeepSpeed's ZeRO-3
        part = part.to_local() if hasattr(part, "to_local") else part  # FSDP2
        if weight.requires_grad and not torch.isfinite(part).all():
            raise FloatingPointError(
                f"the weights are no longer finite after step {step} (the first is {name}), so they are not saved. "
                "Lower the learning rate and start again from the last checkpoint."
            )
