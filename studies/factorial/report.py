"""The tables and the figure of README.md, from data/runs.jsonl: the effects of the ideas and of their interactions, and
what each cell solves."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import combinations
from pathlib import Path
from statistics import fmean
from typing import Any

import numpy as np

from d1.runs.tables import markdown_table
from d1.show.curves import WIDTH, panels, save_figure
from pocket.recipes import ROOT
from pocket.uncertainty import Mean, mean_of
from studies.factorial.run import CELLS, DATA, IDEAS, STUDIED, runs
from studies.json_lines import read_lines
from studies.reports import gain, holm, percent, points, scores

TESTED = 2  # effects of at most this many ideas together are tested
SMALL = 0.02  # an effect whose interval lies within this on both sides is called smaller
FIGURE = ROOT / "docs" / "factorial.svg"

Effects = dict[tuple[str, ...], Mean]
Lines = Sequence[dict[str, Any]]
Cells = dict[str, dict[str, np.ndarray]]  # setup -> cell -> (seeds, problems)


def effects(cells: Mapping[str, np.ndarray]) -> Effects:
    """The effect of each set of ideas, from the (seeds, problems) scores of each cell.

    That of one idea is the mean of the cells with it minus that of the cells without it. That of two is half of the
    first one's effect with the second minus that without it; and so on. So an effect of k ideas is the mean over all
    cells of twice the score, with the sign of the product of k signs, + with and - without the idea (Box, Hunter and
    Hunter 2005, chapter 5).
    """
    found = {}
    for size in range(1, len(IDEAS) + 1):
        for ideas in combinations(IDEAS, size):
            signs = [np.prod([1 if idea in cell.split("+") else -1 for idea in ideas]) for cell in CELLS]
            found[ideas] = mean_of(
                2 * np.mean([sign * cells[cell] for sign, cell in zip(signs, CELLS, strict=True)], 0)
            )
    return found


def lines_of(lines: Lines, setup: str, cell: str) -> list[dict[str, Any]]:
    return [line for line in lines if (line["setup"], line["cell"]) == (setup, cell)]


def every_cell(lines: Lines) -> Cells | None:
    """The scores of each cell of each setup; None as long as a cell lacks a seed that another has."""
    found: Cells = {}
    for setup in STUDIED:
        found[setup] = {cell: scores(lines_of(lines, setup, cell)) for cell in CELLS}
        if len({table.shape for table in found[setup].values()}) != 1 or not found[setup][CELLS[0]].size:
            return None
    return found


def cell_table(found: Cells, lines: Lines) -> str:
    """What each cell solves, its rate, and the mean number of its optimizer steps."""
    rows = []
    for cell in CELLS:
        rows.append([cell])
        for setup in STUDIED:
            own = lines_of(lines, setup, cell)
            solved, steps = percent(mean_of(found[setup][cell])), fmean(line["steps"] for line in own)
            rows[-1] += [solved, f"{own[0]['rate']:.0e}", f"{steps:.0f}"]
    return markdown_table(["cell", *(f"{setup}{of}" for setup in STUDIED for of in ("", ", rate", ", updates"))], rows)


def effect_table(found: Cells) -> str:
    """All effects of each setup, with Holm's p-values over those that are tested in all setups together."""
    every = {(setup, ideas): mean for setup, of in found.items() for ideas, mean in effects(of).items()}
    tested = {key: mean.p for key, mean in every.items() if len(key[1]) <= TESTED and mean.p is not None}
    adjusted = dict(zip(tested, holm([*tested.values()]), strict=True))
    rows = [
        [
            *(setup, " x ".join(ideas), points(mean)),
            f"{adjusted[setup, ideas]:.2g}" if (setup, ideas) in adjusted else "",
            "yes" if max(-mean.low, mean.high) < SMALL else "",
        ]
        for (setup, ideas), mean in every.items()
    ]
    return markdown_table(["setup", "effect", "points [95%]", "Holm's p", "within 2 points"], rows)


def start_table(lines: Lines, starts: Lines) -> str:
    """What the SFT models solve of the problems that judge the cells, and the gain of the cell without any idea."""
    rows = []
    for setup in STUDIED:
        own = [line for line in starts if line["setup"] == setup]
        if own:
            rows.append([setup, percent(mean_of(scores(own))), gain(lines_of(lines, setup, "none"), own)])
    return markdown_table(["setup", "start, % [95%]", "none minus start [95%]"], rows) if rows else "Not judged yet.\n"


def tables(lines: Lines, starts: Lines = ()) -> str:
    """The tables and the figure's name; how many runs are done, as long as some are missing."""
    found = every_cell(lines)
    if found is None:
        return f"{len(lines)} of {len(runs())} planned runs are done. Effects wait for all cells.\n"
    parts = [
        f"### Effects\n\n{effect_table(found)}",
        f"![Effects and interactions of two ideas, in points](../../docs/{FIGURE.name})\n",
        f"### Cells, percent solved [95%]\n\n{cell_table(found, lines)}",
        f"### The start: SFT models on the same problems\n\n{start_table(lines, starts)}",
    ]
    return "\n".join(parts)


def figure(lines: Lines, path: Path = FIGURE) -> None:
    """Plots the tested effects with 95% intervals, a panel per setup; nothing as long as cells are missing."""
    found = every_cell(lines)
    if found is None:
        return
    drawn, axes = panels(1, len(STUDIED), size=(WIDTH, 3.4), share_x=True, share_y=True)
    for axis, (setup, of) in zip(axes, found.items(), strict=True):
        shown = {" x ".join(ideas): mean for ideas, mean in effects(of).items() if len(ideas) <= TESTED}
        value, low, high = 100 * np.array([mean[:3] for mean in shown.values()]).T
        axis.errorbar(value, range(len(shown)), xerr=[value - low, high - value], fmt="o", markersize=4, linewidth=1.2)
        axis.set_yticks(range(len(shown)), [*shown])
        axis.axvline(0, color="0.5", linewidth=1)
        axis.set(title=setup, xlabel="effect, points")
    axes[0].invert_yaxis()
    save_figure(drawn, path)


def parts() -> dict[Path, str]:
    """Page -> the part of it that is written."""
    return {
        Path(__file__).with_name("README.md"): tables(
            read_lines(DATA / "runs.jsonl"), read_lines(DATA / "starts.jsonl")
        )
    }


def write_figure() -> None:
    figure(read_lines(DATA / "runs.jsonl"))
