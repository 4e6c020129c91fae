"""What the figures of all stages share."""

from __future__ import annotations

import html
import io
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

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


INK = "#010203"  # what a panel for a page is drawn in; the page's own colour of text takes its place
INKS = ("text.color", "axes.edgecolor", "axes.labelcolor", "axes.titlecolor", "xtick.color", "ytick.color")
CLEAR: dict[str, Any] = {"figure.facecolor": "none", "axes.facecolor": "none", "legend.framealpha": 0.0}


def panel_svg(draw: Callable[[Axes], object], title: str, name: str, size: tuple[float, float] = (5.2, 3.1)) -> str:
    """A panel as an SVG element for an HTML page, light or dark.

    Args:
        draw: draws into the axes it is given.
        title: what the panel shows, for those who do not see it.
        name: told from those of the page's other panels, of letters and digits.
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
