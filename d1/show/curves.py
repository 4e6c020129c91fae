"""Functions for the figures of all stages."""

from __future__ import annotations

import html
import io
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import matplotlib

matplotlib.use("Agg")  # figures are written to files, also on machines without a screen
from matplotlib import pyplot as plt
from matplotlib.axes import Axes
from matplotlib.figure import Figure


def running_mean(values: Sequence[float], window: int) -> list[float]:
    """The mean of each value and those before it, at most `window` values."""
    recent = [values[max(0, end - window) : end] for end in range(1, len(values) + 1)]
    return [sum(part) / len(part) for part in recent]


def panels(rows: int, columns: int, size: tuple[float, float], share_y: bool = False) -> tuple[Figure, list[Axes]]:
    """A figure of `size` (width, height) in inches and its rows x columns axes, row by row, each with a light grid."""
    figure, grid = plt.subplots(rows, columns, figsize=size, sharey=share_y, squeeze=False, layout="constrained")
    axes = list(grid.flat)
    for axis in axes:
        axis.grid(alpha=0.3)
    return figure, axes


def save_figure(figure: Figure, path: str | Path, dpi: int = 120) -> None:
    """Writes the figure in the format of the path's ending, and frees it."""
    figure.savefig(path, dpi=dpi)
    plt.close(figure)


INK = "#010203"  # the ink of a panel for a page, which is replaced by the page's colour of text
INKS = ("text.color", "axes.edgecolor", "axes.labelcolor", "axes.titlecolor", "xtick.color", "ytick.color")
CLEAR: dict[str, Any] = {"figure.facecolor": "none", "axes.facecolor": "none", "legend.framealpha": 0.0}


def panel_svg(draw: Callable[[Axes], object], title: str, name: str, size: tuple[float, float] = (5.2, 3.1)) -> str:
    """A panel as an SVG element for an HTML page, light or dark.

    Args:
        draw: plots into the given axes.
        title: what the panel shows, for screen readers.
        name: a name of letters and digits that no other panel of the page has.
    """
    file = io.StringIO()
    colours: Any = dict.fromkeys(INKS, INK) | CLEAR
    with matplotlib.rc_context(colours | {"svg.fonttype": "none", "svg.hashsalt": name}):
        figure, (axis,) = panels(1, 1, size)
        draw(axis)
        figure.savefig(file, format="svg", metadata={"Date": None})
        plt.close(figure)
    text = file.getvalue().replace(INK, "currentColor")
    for mark in ('id="', "url(#", 'href="#'):
        text = text.replace(mark, f"{mark}{name}-")
    return f'<svg role="img" aria-label="{html.escape(title)}"' + text[text.index("<svg") + len("<svg") :]
