"""What the figures of all stages share."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import matplotlib

matplotlib.use("Agg")  # figures are written to files, on machines without a screen too
from matplotlib import pyplot as plt
from matplotlib.axes import Axes
from matplotlib.figure import Figure


def running_mean(values: Sequence[float], window: int) -> list[float]:
    """The mean of each value and those before it, `window` of them at most."""
    recent = [values[max(0, end - window) : end] for end in range(1, len(values) + 1)]
    return [sum(part) / len(part) for part in recent]


def panels(rows: int, columns: int, size: tuple[float, float], share_y: bool = False) -> tuple[Figure, list[Axes]]:
    """A figure of `size` inches and its rows x columns axes, row by row, each with a light grid."""
    figure, grid = plt.subplots(rows, columns, figsize=size, sharey=share_y, squeeze=False, layout="constrained")
    axes = list(grid.flat)
    for axis in axes:
        axis.grid(alpha=0.3)
    return figure, axes


def save_figure(figure: Figure, path: str | Path, dpi: int = 120) -> None:
    """Writes the figure as its path's ending says, and frees it."""
    figure.savefig(path, dpi=dpi)
    plt.close(figure)
