"""The tables and the figure of README.md, from data/: gains, their slopes on sizes, and whether the order holds."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from itertools import combinations, product
from pathlib import Path
from typing import Any

import numpy as np
from scipy.stats import spearmanr

from d1.show.curves import MARKED, WIDTH, legend, panels, save_figure
from d1.show.tables import markdown_table
from pocket.recipes import ROOT
from pocket.uncertainty import Mean, mean_of
from studies.json_lines import read_lines
from studies.ladder.bases import BASES, DATA, WIDTHS
from studies.ladder.run import AGAIN, CHECKS, ROWS, RUNS, SEARCH, chosen_rate, runs, scaled_rate
from studies.leaderboard.plan import accuracy
from studies.reports import holm, points, scores

REFERENCE, *OTHERS = ROWS
FIGURE = ROOT / "docs" / "ladder.svg"

Lines = list[dict[str, Any]]
Cell = tuple[str, int, int]  # row, width, base
Table = Mapping[Cell, np.ndarray]  # (seeds, problems) each


def tables(lines: Iterable[dict[str, Any]]) -> dict[Cell, np.ndarray]:
    """The scores of each row, width and base."""
    every, cells = [*lines], product(ROWS, WIDTHS, BASES)
    return {
        cell: scores(line for line in every if (line["row"], line["width"], line["base"]) == cell) for cell in cells
    }


def gain(found: Table, row: str, width: int, base: int) -> np.ndarray:
    """(seeds, problems): the scores of a row minus those of the reference."""
    return found[row, width, base] - found[REFERENCE, width, base]


def slopes(gains: Sequence[np.ndarray], sizes: Sequence[float]) -> np.ndarray:
    """The least-squares slope of gains, (sizes, ...), on sizes: (...)."""
    centred = np.asarray(sizes) - np.mean(sizes)
    return np.tensordot(centred / (centred**2).sum(), np.stack(gains), 1)


def slopes_of(found: Table, octaves: Sequence[float], row: str) -> list[np.ndarray]:
    """Per base, the slope of a row's gain on log2 of the number of parameters, of each seed and problem."""
    return [slopes([gain(found, row, width, base) for width in WIDTHS], octaves) for base in BASES]


def interactions(found: Table, octaves: Sequence[float]) -> dict[str, tuple[Mean, list[Mean], float]]:
    """Row -> its mean slope over the bases, its slope per base, and Holm's p-value of the mean."""
    each = {row: slopes_of(found, octaves, row) for row in OTHERS}
    means = {row: mean_of(np.mean(of, 0)) for row, of in each.items()}
    adjusted = holm([1.0 if mean.p is None else mean.p for mean in means.values()])
    return {row: (means[row], [mean_of(of) for of in each[row]], p) for row, p in zip(OTHERS, adjusted, strict=True)}


def gain_table(found: Table) -> str:
    rows = []
    for row, base in product(OTHERS, BASES):
        gains = [mean_of(gain(found, row, width, base)) for width in WIDTHS]
        rows.append([row, str(base + 1), *map(points, gains)])
    solved = [
        [f"{REFERENCE}, solved, %", str(base + 1), *(f"{100 * found[REFERENCE, w, base].mean():.1f}" for w in WIDTHS)]
        for base in BASES
    ]
    return markdown_table(["row", "base", *(f"width {width}" for width in WIDTHS)], [*solved, *rows])


def robust(found: Table) -> list[str]:
    """The rows whose gain has an interval above 0 at all sizes and with both bases."""
    cells = [*product(WIDTHS, BASES)]
    return [row for row in OTHERS if all(mean_of(gain(found, row, *at)).low > 0 for at in cells)]


def order_table(found: Table) -> str:
    """Rank correlations of the rows' means between sizes, per base."""
    means = {at: [found[row, *at].mean() for row in ROWS] for at in product(WIDTHS, BASES)}
    rows = [
        [f"{a} and {b}", *(f"{spearmanr(means[a, base], means[b, base]).statistic:+.2f}" for base in BASES)]
        for a, b in combinations(WIDTHS, 2)
    ]
    return markdown_table(["widths", *(f"base {base + 1}" for base in BASES)], rows)


def again_table(tested: Lines, repeated: Lines) -> str:
    """Gains at the first width with the seeds that were run again: in the test, again, and their difference."""
    seeds = {line["seed"] for line in repeated}
    both = [tables(line for line in lines if line["seed"] in seeds) for lines in (tested, repeated)]
    rows = []
    for row, base in product(OTHERS, BASES):
        first, second = (gain(found, row, WIDTHS[0], base) for found in both)
        rows.append([row, str(base + 1), *(points(mean_of(of)) for of in (first, second, second - first))])
    return markdown_table(["row", "base", "in the test", "again", "difference"], rows)


def rate_table() -> str:
    """The rates of the test. Where a check replaced the scaled rate: by which factor, and what the two solved."""
    searched, checked = read_lines(SEARCH), read_lines(CHECKS)

    def cell(row: str, width: int) -> str:
        scaled, rate = scaled_rate(row, width, searched), chosen_rate(row, width, searched, checked)
        if rate == scaled:
            return f"{rate:.1e}"
        of = {one["rate"]: accuracy(one["right"]) for one in checked if (one["row"], one["width"]) == (row, width)}
        return f"{rate:.1e}, x {rate / scaled:.2g} ({100 * of[rate]:.1f} instead of {100 * of[scaled]:.1f})"

    return markdown_table(
        ["row", *(f"width {width}" for width in WIDTHS)], [[row, *(cell(row, w) for w in WIDTHS)] for row in ROWS]
    )


def results(lines: Lines, octaves: Sequence[float]) -> str:
    """The tables of gains, slopes and orders; how many runs are done, as long as some are missing."""
    found = tables(lines)
    planned = sum(len(runs(width)) for width in WIDTHS)
    if len({of.shape for of in found.values()}) != 1 or not next(iter(found.values())).size:
        return f"{len(lines)} of {planned} planned runs are done. Gains wait for all of them.\n"
    rows = [
        [row, *map(points, of_bases), points(mean), f"{p:.2g}"]
        for row, (mean, of_bases, p) in interactions(found, octaves).items()
    ]
    head = ["row", *(f"base {base + 1}" for base in BASES), "both", "Holm's p"]
    above = ", ".join(robust(found)) or "none"
    parts = [
        f"![Gains over {REFERENCE} against the number of parameters](../../docs/{FIGURE.name})\n",
        f"### Gains over {REFERENCE}, points [95%]\n\n{gain_table(found)}",
        f"Gains that are above 0 at all sizes and with both bases: {above}.\n",
        f"### Slopes of gains, points per doubling of the parameters [95%]\n\n{markdown_table(head, rows)}",
        f"### Order: rank correlation of the rows' accuracies between two sizes\n\n{order_table(found)}",
        f"### Rates of the test, and what a check solved in percent if it changed one\n\n{rate_table()}",
    ]
    return "\n".join(parts)


def bases_table(lines: Lines) -> str:
    rows = [
        [
            *(str(line["width"]), str(line["base"] + 1), f"{line['parameters'] / 1e6:.2f}"),
            *(f"{steps}" for steps in line["steps"]),
            *(f"{100 * share:.1f}" for share in line["solved"]),
            f"{line['processor_seconds'] / 3600:.2f}",
        ]
        for line in lines
    ]
    head = ["width", "base", "million parameters", "steps: short problems", "blocks", "careful answers", "mixed"]
    head += ["solved after blocks, %", "careful answers, %", "mixed, the start, %", "processor hours"]
    return markdown_table(head, rows) if rows else "No base is made yet.\n"


def octaves_of(lines: Lines) -> list[float]:
    """log2 of the number of parameters of each width."""
    sizes = {line["width"]: line["parameters"] for line in lines}
    return [float(np.log2(sizes[width])) for width in WIDTHS]


def figure(lines: Lines, sizes: Mapping[int, int], path: Path = FIGURE) -> None:
    """Plots gains with 95% intervals against the number of parameters, a panel per base."""
    found = tables(lines)
    drawn, axes = panels(1, len(BASES), size=(WIDTH, 3.2), share_y=True)
    for base, axis in zip(BASES, axes, strict=True):
        for number, (style, row) in enumerate(zip(MARKED, OTHERS, strict=False)):
            means = [mean_of(gain(found, row, width, base)) for width in WIDTHS]
            value, low, high = 100 * np.array([mean[:3] for mean in means]).T
            at = [sizes[width] / 1e6 * 1.04 ** (number - len(OTHERS) / 2) for width in WIDTHS]  # apart
            axis.errorbar(at, value, [value - low, high - value], markersize=4, linewidth=1.2, label=row, **style)
        axis.axhline(0, color="0.5", linewidth=1)
        axis.set_xscale("log")
        axis.set_xticks([sizes[width] / 1e6 for width in WIDTHS], [f"{sizes[width] / 1e6:.1f}" for width in WIDTHS])
        axis.set_xticks([], minor=True)
        axis.set(title=f"base {base + 1}", xlabel="million parameters")
    axes[0].set_ylabel(f"gain over {REFERENCE}, points")
    legend(drawn, columns=5)
    save_figure(drawn, path)


def parts() -> dict[Path, str]:
    """Page -> the part of it that is written."""
    bases, lines = read_lines(DATA / "bases.jsonl"), read_lines(RUNS)
    done = {line["width"] for line in bases} == {*WIDTHS}
    text = results(lines, octaves_of(bases) if done else [])
    again = again_table(lines, read_lines(AGAIN))
    text += f"\n### Width {WIDTHS[0]} again, on a CPU in fp32: gains over {REFERENCE}, points [95%]\n\n{again}"
    return {Path(__file__).with_name("README.md"): f"{bases_table(bases)}\n{text}"}


def write_figure() -> None:
    """Writes the figure; nothing as long as runs are missing."""
    bases, lines = read_lines(DATA / "bases.jsonl"), read_lines(RUNS)
    if len(lines) == sum(len(runs(width)) for width in WIDTHS):
        figure(lines, {line["width"]: line["parameters"] for line in bases})
