"""Accuracy by completion length, for the models of a results folder beside d1's published figures."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from d1.eval.scores import Row
from d1.show.curves import panels, save_figure

# LLaDA-8B at lengths 128, 256 and 512: d1 (arXiv 2504.12216), table 1.
PUBLISHED_LENGTHS = (128, 256, 512)
PUBLISHED = {
    "gsm8k": {
        "LLaDA-8B-Instruct": (68.7, 76.7, 78.2),
        "+ SFT": (66.5, 78.8, 81.1),
        "+ diffu-GRPO": (72.6, 79.8, 81.9),
        "d1 (SFT + diffu-GRPO)": (73.2, 81.1, 82.1),
    },
    "math": {
        "LLaDA-8B-Instruct": (26.0, 32.4, 36.2),
        "+ SFT": (26.2, 32.6, 34.8),
        "+ diffu-GRPO": (33.2, 37.2, 39.2),
        "d1 (SFT + diffu-GRPO)": (33.8, 38.6, 40.2),
    },
    "countdown": {
        "LLaDA-8B-Instruct": (20.7, 19.5, 16.0),
        "+ SFT": (20.3, 14.5, 23.8),
        "+ diffu-GRPO": (33.2, 31.3, 37.1),
        "d1 (SFT + diffu-GRPO)": (34.8, 32.0, 42.2),
    },
    "sudoku": {
        "LLaDA-8B-Instruct": (11.7, 6.7, 5.5),
        "+ SFT": (16.5, 8.5, 4.6),
        "+ diffu-GRPO": (18.4, 12.9, 11.0),
        "d1 (SFT + diffu-GRPO)": (22.1, 16.7, 9.5),
    },
}
PUBLISHED_NOTE = "dashed: LLaDA-8B as published by d1 (Sudoku: share of cells, not of solved puzzles)"


def plot_rows(rows: Sequence[Row], path: str | Path) -> None:
    """One panel a task: the rows' accuracy with its 95% interval, solid, and d1's published figures, dashed.

    Raises:
        ValueError: no row has an accuracy.
    """
    scored = [row for row in rows if row.accuracy is not None]
    if not scored:
        raise ValueError("nothing to plot: no setup has a scored problem")
    tasks = sorted({row.task for row in scored})
    figure, axes = panels(1, len(tasks), size=(5.2 * len(tasks), 4.6))
    for axis, task in zip(axes, tasks, strict=True):
        for model in sorted({row.model for row in scored if row.task == task}):
            line = sorted((row for row in scored if (row.task, row.model) == (task, model)), key=lambda r: r.gen_length)
            heights = [row.accuracy or 0.0 for row in line]
            below = [height - (row.ci_low or 0.0) for height, row in zip(heights, line, strict=True)]
            above = [(row.ci_high or 0.0) - height for height, row in zip(heights, line, strict=True)]
            axis.errorbar([row.gen_length for row in line], heights, [below, above], marker="o", capsize=3, label=model)
        for name, published in PUBLISHED.get(task, {}).items():
            axis.plot(PUBLISHED_LENGTHS, published, linestyle="--", marker=".", alpha=0.6, label=f"{name}, published")
        lengths = sorted({row.gen_length for row in scored if row.task == task} | set(PUBLISHED_LENGTHS))
        axis.set_xscale("log", base=2)
        axis.set_xticks(lengths, [str(length) for length in lengths])
        axis.minorticks_off()
        axis.set(title=task, xlabel="completion length (tokens)", ylabel=f"accuracy, {scored[0].scoring} scoring (%)")
        axis.set_ylim(bottom=0)
        axis.legend(fontsize=7)
    figure.suptitle(PUBLISHED_NOTE, fontsize=8)
    save_figure(figure, path, dpi=150)
