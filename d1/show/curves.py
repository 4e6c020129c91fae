"""The figures of all stages, in one style: everything that plots uses `panels`, `legend` and `save_figure`."""

from __future__ import annotations

import html
import io
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import matplotlib
from cycler import cycler

matplotlib.use("Agg")  # figures are written to files, also on machines without a screen
from matplotlib import pyplot as plt
from matplotlib.axes import Axes
from matplotlib.figure import Figure

# The colours of Okabe and Ito (2008), which colour-blind readers can tell apart.
OKABE_ITO = ("#0072b2", "#d55e00", "#009e73", "#cc79a7", "#e69f00", "#56b4e9")
LINES: list[Any] = [{"color": colour, "linestyle": line} for line in ("-", "--", ":") for colour in OKABE_ITO]
STYLE: Any = {
    "axes.prop_cycle": cycler(color=OKABE_ITO),
    "axes.formatter.useoffset": False,  # ticks show their values, not a difference from a number in the corner
    "axes.grid": True,
    "grid.alpha": 0.3,
    "axes.spines.top": False,
    "axes.spines.right": False,
}


def running_mean(values: Sequence[float], window: int) -> list[float]:
    """The mean of each value and those before it, at most `window` values."""
    recent = [values[max(0, end - window) : end] for end in range(1, len(values) + 1)]
    return [sum(part) / len(part) for part in recent]


def panels(rows: int, columns: int, size: tuple[float, float], share_y: bool = False) -> tuple[Figure, list[Axes]]:
    """A figure of `size` (width, height) in inches and its rows x columns axes, row by row."""
    with matplotlib.rc_context(STYLE):
        figure, grid = plt.subplots(rows, columns, figsize=size, sharey=share_y, squeeze=False, layout="constrained")
    return figure, list(grid.flat)


def legend(figure: Figure, columns: int = 4) -> None:
    """One legend for all axes, below them, where it covers nothing; equal labels share an entry."""
    named = {
        label: handle for axis in figure.axes for handle, label in zip(*axis.get_legend_handles_labels(), strict=True)
    }
    if named:
        figure.legend(
            [*named.values()], [*named], loc="outside lower center", ncols=min(len(named), columns), fontsize="small"
        )


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
        if len(axis.get_legend_handles_labels()[1]) > 1:
            legend(figure)
        figure.savefig(file, format="svg", metadata={"Date": None})
        plt.close(figure)
    text = file.getvalue().replace(INK, "currentColor")
    for mark in ('id="', "url(#", 'href="#'):
        text = text.replace(mark, f"{mark}{name}-")
    return f'<svg role="img" aria-label="{html.escape(title)}"' + text[text.index("<svg") + len("<svg") :]
