"""The figures of all stages, in one style: everything that plots uses `panels`, `legend` and `save_figure`.

The figures of documents are SVGs of the width `WIDTH`: legible on a page of 700 px, with a light or a dark theme. Black
stands for the colour of text, which is the reader's in an SVG.
"""

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

WIDTH = 7.2  # inches: on a page of 700 px, a font of 8 points has 10.8 px
SMALL = 8  # points: the smallest font
# The colours of Okabe and Ito (2008), which colour-blind readers can tell apart, and three more for crowded figures.
OKABE_ITO = ("#0072b2", "#d55e00", "#009e73", "#cc79a7", "#e69f00", "#56b4e9")
MARKERS = ("o", "s", "^", "D", "v", "<", "P", "X", ">")
MARKED: list[Any] = [  # no two share a colour or a marker
    {"color": colour, "marker": marker}
    for colour, marker in zip((*OKABE_ITO, "#8b66d0", "#8a8a00", "#a3563f"), MARKERS, strict=True)
]
STYLE: Any = {
    "axes.prop_cycle": cycler(color=[style["color"] for style in MARKED]),
    "axes.formatter.useoffset": False,  # ticks show their values, not a difference from a number in the corner
    "axes.grid": True,
    "grid.alpha": 0.3,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.labelsize": SMALL + 1,
    "figure.constrained_layout.w_pad": 0.08,  # inches around each panel, also at the edge of a card
    "figure.constrained_layout.h_pad": 0.08,
}
MIN_SPAN = 0.1  # of the largest value


def running_mean(values: Sequence[float], window: int) -> list[float]:
    """The mean of each value and those before it, at most `window` values."""
    means = []
    for end in range(1, len(values) + 1):
        recent = values[max(0, end - window) : end]
        means.append(sum(recent) / len(recent))
    return means


def panels(
    rows: int,
    columns: int,
    size: tuple[float, float],
    share_x: bool = False,
    share_y: bool = False,
    heights: Sequence[float] | None = None,
) -> tuple[Figure, list[Axes]]:
    """A figure of `size` (width, height) in inches and its rows x columns axes, row by row; `heights` are relative, and
    equal by default."""
    with matplotlib.rc_context(STYLE):
        figure, grid = plt.subplots(
            rows,
            columns,
            figsize=size,
            layout="constrained",
            sharex=share_x,
            sharey=share_y,
            height_ratios=heights,
            squeeze=False,
        )
    for axis in grid.flat:
        axis.tick_params(labelsize=SMALL)
    return figure, list(grid.flat)


def widen(axis: Axes) -> None:
    """Makes the vertical axis span at least `MIN_SPAN` of its largest value: a small change looks small."""
    low, high = map(float, axis.dataLim.intervaly)  # high < low without data
    missing = MIN_SPAN * max(abs(low), abs(high)) - (high - low)
    if low <= high and missing > 0:
        axis.set_ylim(low - missing / 2, high + missing / 2)


def legend(figure: Figure, columns: int = 4) -> None:
    """One legend for all axes, below them, where it covers nothing; equal labels share an entry. It has at most
    `columns` columns, and fewer if the figure is too narrow for them."""
    entries: dict[str, Any] = {}
    for axis in figure.axes:
        handles, labels = axis.get_legend_handles_labels()
        entries.update(zip(labels, handles, strict=True))
    for count in range(min(len(entries), columns), 0, -1):
        drawn = figure.legend(
            list(entries.values()),
            list(entries),
            loc="outside lower center",
            ncols=count,
            frameon=False,
            fontsize=SMALL,
        )
        if count == 1 or drawn.get_window_extent().width <= figure.bbox.width:
            break
        drawn.remove()


def save_figure(figure: Figure, path: str | Path) -> None:
    """Writes the figure in the format of the path's ending, and frees it. An SVG follows its reader's theme; any other
    format has a white ground."""
    if Path(path).suffix.lower() == ".svg":
        text = svg_of(figure, "figure")
        end = text.index(">") + 1
        Path(path).write_text(f"{text[:end]}\n{CARD}{text[end:]}", encoding="utf-8")
    else:
        figure.savefig(path, dpi=160)
    plt.close(figure)


# A picture in a document does not inherit its page's colours, so it brings a ground of its own, light or dark.
CARD = """<style>svg{color:#1b1f24}.card{fill:#fff}
@media(prefers-color-scheme:dark){svg{color:#e8ecf1}.card{fill:#161b22}}</style>
<rect class="card" width="100%" height="100%" rx="6"/>"""


def svg_of(figure: Figure, name: str) -> str:
    """The figure as an SVG element without a ground; what is black takes the colour of the text around it.

    Args:
        figure: stays open.
        name: the salt of the ids in the element, which is the same text for the same figure.
    """
    file = io.StringIO()
    with matplotlib.rc_context({"svg.fonttype": "none", "svg.hashsalt": name}):
        figure.savefig(file, format="svg", metadata={"Date": None}, transparent=True)
    text = file.getvalue().replace("#000000", "currentColor")
    # Matplotlib gives black text no colour; the other elements have one.
    return '<svg fill="currentColor"' + text[text.index("<svg") + len("<svg") :]


def panel_svg(draw: Callable[[Axes], object], title: str, name: str) -> str:
    """A panel as an SVG element for an HTML page, light or dark.

    Args:
        draw: plots into the given axes.
        title: what the panel shows, for screen readers.
        name: a name of letters and digits that no other panel of the page has.
    """
    figure, (axis,) = panels(1, 1, (3.8, 2.6))
    draw(axis)
    if len(axis.get_legend_handles_labels()[1]) > 1:
        legend(figure)
    text = svg_of(figure, name)
    plt.close(figure)
    for mark in ('id="', "url(#", 'href="#'):
        text = text.replace(mark, f"{mark}{name}-")
    return f'<svg role="img" aria-label="{html.escape(title)}"' + text[len("<svg") :]
