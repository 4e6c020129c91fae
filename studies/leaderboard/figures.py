"""The leaderboard's two figures: one panel per setup, colours that colour-blind readers tell apart, one legend."""

from __future__ import annotations

from pathlib import Path

import numpy as np

from d1.show.curves import LINES, OKABE_ITO, legend, panels, save_figure
from studies.leaderboard.plan import START
from studies.leaderboard.tables import Table

CURVES = 5  # the most accurate methods, drawn in a panel together with d1


def draw_places(tables: list[Table], path: Path) -> None:
    """Accuracy and rank of each method with their intervals, the best at the top; the start as a dashed line."""
    figure, axes = panels(1, len(tables), size=(4.2 * len(tables), 6))
    for axis, table in zip(axes, tables, strict=True):
        names = [name for name in table.places if name != START]
        for height, name in enumerate(reversed(names)):
            place = table.places[name]
            ranked = name in table.order.ranks
            value, low, high = (100 * part for part in place.solved)
            axis.errorbar(
                value, height, xerr=[[value - low], [high - value]], fmt="o" if ranked else "s",
                color=OKABE_ITO[0] if ranked else "0.5", mfc=None if ranked else "none", capsize=2,
            )  # fmt: skip
        axis.axvline(100 * table.places[START].solved.value, color="0.4", linestyle="--")
        labels = [f"{name}  {table.order.rank(name)}".rstrip() for name in reversed(names)]
        axis.set_yticks(range(len(names)), labels, fontsize=8)
        axis.set(title=f"{table.setup.task} from {table.setup.start}", xlabel="sealed problems solved, %")
    figure.supxlabel("filled: all seeds, with the rank; hollow: no rank; dashed: the start", fontsize=9)
    save_figure(figure, path)


def draw_curves(tables: list[Table], path: Path) -> None:
    """Accuracy on validation problems against compute: the best methods and d1, mean and range over seeds."""
    figure, axes = panels(1, len(tables), size=(4.2 * len(tables), 3.6))
    chosen = [[*[name for name in table.places if name not in (START, "d1")][:CURVES], "d1"] for table in tables]
    names = [*dict.fromkeys(name for of in chosen for name in of)]
    for axis, table, own in zip(axes, tables, chosen, strict=True):
        for name in own:
            curves = [np.array(line["curve"]) for line in table.runs[name].values() if len(line["curve"]) == 4]
            if not curves:
                continue
            style = LINES[names.index(name) % len(LINES)]
            shares, values = curves[0][:, 0], 100 * np.stack([curve[:, 1] for curve in curves])
            axis.plot(table.budget * shares, values.mean(0), label=name, marker=".", **style)
            axis.fill_between(table.budget * shares, values.min(0), values.max(0), color=style["color"], alpha=0.15)
        axis.set(title=f"{table.setup.task} from {table.setup.start}", xlabel="compute tokens")
    axes[0].set_ylabel("validation problems solved, %")
    legend(figure, columns=8)
    save_figure(figure, path)
