"""A picture of a masked SFT run's losses."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from d1.show.curves import panels, save_figure


def plot_losses(history: list[dict[str, Any]], path: Path) -> None:
    """Training and evaluation loss, and the latter's bands of t, against optimizer steps."""
    figure, (axes,) = panels(1, 1, (8, 5))
    for name in sorted({key for entry in history for key in entry if key == "loss" or key.startswith("eval_loss")}):
        points = [(entry["step"], entry[name]) for entry in history if name in entry]
        label = {"loss": "training", "eval_loss": "evaluation"}.get(name, name.replace("eval_loss_t", "evaluation, t "))
        axes.plot(*zip(*points, strict=True), label=label, lw=2 if name in ("loss", "eval_loss") else 1, marker=".")
    axes.set(xlabel="optimizer step", ylabel="cross-entropy / t', nats per answer token", title="Masked SFT")
    axes.legend()
    save_figure(figure, path, dpi=150)
