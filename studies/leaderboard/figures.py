"""The leaderboard's two figures: every point has its name next to it, so neither needs a legend of colours."""

from __future__ import annotations

from pathlib import Path

import numpy as np
from matplotlib.axes import Axes
from scipy.optimize import isotonic_regression

from d1.show.curves import MARKED, OKABE_ITO, SMALL, WIDTH, panels, save_figure
from studies.leaderboard.plan import START, short
from studies.leaderboard.tables import Table

CURVES = 5  # the most accurate methods, drawn in a panel together with d1
ROW = 0.19  # inches per method
GAP = 0.065  # of a panel's height: the least distance of two names


def draw_places(tables: list[Table], path: Path) -> None:
    """Accuracy of each method with its interval, and its rank, one panel per table, the best at the top."""
    heights = [len(table.places) for table in tables]
    size = (WIDTH, sum(ROW * height + 0.45 for height in heights) + 0.3)
    figure, axes = panels(len(tables), 1, size=size, share_x=True, heights=heights)
    for axis, table in zip(axes, tables, strict=True):
        draw_table(axis, table)
    hollow = any(name not in table.order.ranks for table in tables for name in table.places if name != START)
    note = "sealed problems solved, %, with 95% interval; right: rank" + "; hollow: no rank" * hollow
    axes[-1].set_xlabel(note)
    save_figure(figure, path)


def draw_table(axis: Axes, table: Table) -> None:
    """One table: a row per method, the start as a row and as a dashed line."""
    names = [*reversed(table.places)]
    for height, name in enumerate(names):
        value, low, high = (100 * part for part in table.places[name].solved[:3])
        ranked = name in table.order.ranks
        axis.errorbar(
            value, height, xerr=[[value - low], [high - value]], fmt="D" if name == START else "o", capsize=2,
            color="0.5" if name == START else OKABE_ITO[0], mfc=None if ranked or name == START else "none",
        )  # fmt: skip
        axis.annotate(
            table.order.rank(name), (1.01, height), xycoords=("axes fraction", "data"), va="center", size=SMALL
        )
    axis.axvline(100 * table.places[START].solved.value, color="0.5", linestyle="--", linewidth=1)
    axis.set_yticks(range(len(names)), ["the start itself" if name == START else short(name) for name in names])
    axis.set_ylim(-0.6, len(names) - 0.4)
    axis.set_title(f"{table.setup.task} from {table.setup.start}", loc="left")


def draw_curves(tables: list[Table], path: Path) -> None:
    """Accuracy on validation problems against compute: the best methods and d1, mean and range over seeds."""
    rows = (len(tables) + 1) // 2
    figure, axes = panels(rows, 2, size=(WIDTH, 3.1 * rows))
    chosen = [[*[name for name in table.places if name not in (START, "d1")][:CURVES], "d1"] for table in tables]
    names = [*dict.fromkeys(name for of in chosen for name in of)]
    for axis, table, own in zip(axes, tables, chosen, strict=False):
        ends = {}
        for number, name in enumerate(own):
            curves = [np.array(line["curve"]) for line in table.runs[name].values() if len(line["curve"]) == 4]
            if not curves:
                continue
            style = MARKED[names.index(name) % len(MARKED)]
            shares, values = curves[0][:, 0], 100 * np.stack([curve[:, 1] for curve in curves])
            mean, spent = values.mean(0), table.budget * shares / 1e6
            at = spent + (number - len(own) / 2) * 0.012 * spent[-1]  # apart, so that no range covers another
            axis.errorbar(at, mean, [mean - values.min(0), values.max(0) - mean], markersize=4, linewidth=1.2,
                          elinewidth=0.8, **style)  # fmt: skip
            ends[name] = (at[-1], mean[-1], style["color"])
        axis.set(title=f"{table.setup.task} from {table.setup.start}", xlabel="million compute tokens")
        axis.set_ylabel("validation problems solved, %")
        write_names(axis, ends)
    for axis in axes[len(tables) :]:
        axis.remove()
    save_figure(figure, path)


def write_names(axis: Axes, ends: dict[str, tuple[float, float, str]]) -> None:
    """Writes each curve's name to the right of the panel, near the height of its end (x, y, colour), with a line."""
    low, high = axis.get_ylim()
    names = sorted(ends, key=lambda name: ends[name][1])
    wanted = [(ends[name][1] - low) / (high - low) for name in names]
    for name, height in zip(names, apart(wanted, GAP), strict=True):
        x, y, colour = ends[name]
        line = {"arrowstyle": "-", "color": colour, "linewidth": 0.8, "shrinkA": 1, "shrinkB": 3}
        axis.annotate(
            short(name), (x, y), (1.04, height), textcoords="axes fraction", va="center", size=SMALL, arrowprops=line
        )  # fmt: skip


def apart(wanted: list[float], least: float) -> list[float]:
    """The heights that are nearest to `wanted` (least squares) with at least `least` between any two; both ascend."""
    steps = least * np.arange(len(wanted))
    return [*(isotonic_regression(np.array(wanted) - steps).x + steps)]
