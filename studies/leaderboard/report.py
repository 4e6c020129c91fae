"""What the leaderboard shows: tables, curves and a page, of all that is there so far."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean

import numpy as np

from d1.rl.methods import METHODS
from d1.show.curves import panels, running_mean, save_figure
from d1.show.tables import markdown_table
from pocket.uncertainty import Mean, mean_of
from studies.leaderboard.plan import MUS, RATES, START, TUNING_TASKS, Run
from studies.leaderboard.reasons import changes_table, correlations_table
from studies.leaderboard.results import Line, Setup, gains, grid, lines_of, methods_of, scores_at, table
from studies.leaderboard.statistics import holm, percent, points
from studies.pages import reading

REFERENCE = "d1"


@dataclass(frozen=True)
class Board:
    """What is planned and what is there.

    Attributes:
        runs, starts: of the board; `results` has those that are done.
        search: those of the search that are done, of `searched`.
        changes: runs of d1 with one choice changed that are done, of `changed`.
        settings: method -> (rate, mu).
        planned: runs of the whole board, also of methods whose search is not done.
    """

    runs: Sequence[Run]
    starts: Sequence[Run]
    results: Mapping[Run, Line]
    search: Mapping[Run, Line]
    changes: Mapping[Run, Line]
    settings: Mapping[str, tuple[float, int]]
    planned: int
    budget: int
    searched: int
    changed: Sequence[Run]

    @property
    def setups(self) -> list[Setup]:
        return [*dict.fromkeys(Setup(run.task, run.start) for run in self.results)]

    @property
    def done(self) -> int:
        return sum(run.method != START for run in self.results)


def compared(board: Board) -> dict[tuple[Setup, str], Mean]:
    """Each method - d1 at the end, paired by seed and problem; of these differences the p-values are Holm's, over all
    of the board."""
    found: dict[tuple[Setup, str], Mean] = {}
    for setup in board.setups:
        ends = {method: scores_at(board.results, setup, method, "end") for method in methods_of(board.results, setup)}
        reference = ends.pop(REFERENCE, {})
        found |= {(setup, method): mean for method, mean in gains(reference, ends).items()}
    corrected = holm([mean.p for mean in found.values()])
    return {key: mean._replace(p=p) for (key, mean), p in zip(found.items(), corrected, strict=True)}


def setup_table(board: Board, setup: Setup, against: Mapping[tuple[Setup, str], Mean]) -> str:
    """One row a method, the best end first."""
    ends = {
        method: table(scores_at(board.results, setup, method, "end")) for method in methods_of(board.results, setup)
    }
    rows = [start_row(board, setup)] if scores_at(board.results, setup, START, "end") else []
    for method in sorted(ends, key=lambda method: -ends[method].mean()):
        quarter = table(scores_at(board.results, setup, method, "quarter"))
        lines = lines_of(board.results, setup, method)
        difference = against.get((setup, method))
        kls = [line["kl"] for line in lines if line["kl"] is not None]
        rows.append(
            [
                method,
                percent(mean_of(quarter)),
                percent(mean_of(ends[method])),
                points(difference) if difference else "",
                f"{difference.p:.2g}" if difference else "",
                f"{sum(line['diverged'] for line in lines)} / {len(lines)}",
                f"{fmean(kls):.3f}" if kls else "",
                f"{fmean(line['rollouts'] for line in lines):.0f}",
                f"{fmean(line['seconds'] for line in lines):.0f}",
                f"{fmean(line['processor_seconds'] for line in lines):.0f}",
                f"{max(line['peak_memory_gb'] for line in lines):.2f}",
            ]
        )
    header = ["method", "at a quarter", "at the end", f"less {REFERENCE}'s", "Holm's p", "diverged", "KL", "rollouts"]
    return markdown_table([*header, "seconds", "processor s", "GB"], rows)


def start_row(board: Board, setup: Setup) -> list[str]:
    own = scores_at(board.results, setup, START, "end")
    return ["the start itself", "", percent(mean_of(table(own))), *[""] * 8]


def settings_table(board: Board) -> str:
    """What was searched, and what the search found, beside the paper's."""
    rows = []
    for method in dict.fromkeys(run.method for run in board.search):
        paper = METHODS[method]
        found = grid(board.search, method)
        cells = []
        for rate in RATES:
            here = [(mu, fmean(by_task.values())) for (at, mu), by_task in sorted(found.items()) if at == rate]
            cells.append(", ".join(f"{100 * share:.1f} (mu {mu})" for mu, share in here))
        chosen = "{:g}, {}".format(*board.settings[method]) if method in board.settings else "not all runs done"
        given = f"{paper.scale['learning_rate']:g}" if "learning_rate" in paper.scale else "not given"
        rows.append([method, chosen, f"{given}, {paper.values['num_iterations']}", *cells])
    return markdown_table(["method", "rate, mu here", "the paper's", *(f"rate {rate:g}" for rate in RATES)], rows)


def draw(board: Board, path: Path) -> None:
    """A panel a method: its rollouts' accuracy against compute, mean over seeds, d1's dotted beside it; points are the
    greedy test accuracies at a quarter and at the end."""
    methods = [name for name in METHODS if any(run.method == name for run in board.results)]
    columns = min(5, len(methods))
    figure, axes = panels(-(-len(methods) // columns), columns, size=(3.2 * columns, 2.6 * -(-len(methods) // columns)))
    for axis, method in zip(axes, methods, strict=False):
        for number, setup in enumerate(board.setups):
            colour = f"C{number}"
            for name, style in {REFERENCE: ":", method: "-"}.items():
                places, values = mean_curve([line["curve"] for line in lines_of(board.results, setup, name)])
                label = setup.label if name == method else None
                axis.plot(places, values, style, color=colour, linewidth=1, label=label)
            for place, point in ((0.25, "quarter"), (1.0, "end")):
                scores = scores_at(board.results, setup, method, point)
                if scores:
                    axis.plot(place * board.budget / 1e6, table(scores).mean(), "o", color=colour, markersize=4)
        axis.set(title=method, ylim=(0, 1))
    for axis in axes[len(methods) :]:
        axis.set_axis_off()
    figure.legend(*axes[0].get_legend_handles_labels(), loc="outside upper center", ncols=len(board.setups))
    figure.supxlabel("compute, millions of tokens")
    figure.supylabel("solved")
    save_figure(figure, path)


def mean_curve(curves: Sequence[Sequence[Sequence[float]]]) -> tuple[list[float], list[float]]:
    """Millions of tokens and the mean over runs of the accuracy there, where all runs still have one."""
    kept = [np.array(curve, dtype=float) for curve in curves if len(curve) > 1]
    if not kept:
        return [], []
    places = np.linspace(max(c[0, 0] for c in kept), min(c[-1, 0] for c in kept), 60)
    values = np.mean([np.interp(places, c[:, 0], running_mean(list(c[:, 1]), 5)) for c in kept], axis=0)
    return list(places / 1e6), list(values)


def write_report(board: Board, path: Path) -> str:
    """Writes the page, and the figure beside it; returns what to say about it."""
    if not board.done:
        return f"No run of the board is done yet; {len(board.search)} of {board.searched} runs of the search are."
    path.parent.mkdir(parents=True, exist_ok=True)
    figure = path.with_suffix(".png")
    draw(board, figure)
    against = compared(board)
    processors = sorted({line["record"]["cpu"]["model"] for line in board.results.values()})
    text = "# Which method is best at the same compute?\n\n"
    text += (
        "Written by `python -m studies.leaderboard.run`; results are lines of `results.jsonl` in its output folder.\n\n"
    )
    if board.done < board.planned:
        text += f"**Partial: {board.done} of {board.planned} runs are done.** Rows are of the seeds that are there.\n\n"
    text += f"""Every run has the same compute, {board.budget:,} tokens through the body: forward once, backward
twice, rollouts included, evaluations not. Rollouts are 64 completions in groups of eight, the rate is constant, and all
else is as the method's row of `METHODS` has it. Solved in percent of the test problems, greedy, with 95% intervals over
seeds and problems. Differences to {REFERENCE} are paired by seed and problem; how far they vary by seed is estimated
from all methods of a table together; their p-values are corrected for their number ({len(against)}) by Holm's rule. KL:
nats a token of the last model to its start, along its own completions. A run whose loss or weights were no longer
finite has diverged and solves nothing. Seconds are those of training, a core a run ({"; ".join(processors)});
where other programs share the machine, the processor's are the ones to compare.\n\n"""
    for setup in board.setups:
        text += f"## {setup.label}\n\n{setup_table(board, setup, against)}\n"
    text += f"""![Accuracy against compute, a panel a method]({figure.name})

Lines: sampled completions of training problems, mean over seeds, d1's dotted. Points: test problems, greedy.

{reasons(board)}## Settings\n\n"""
    if board.searched:
        rates, mus = ", ".join(f"{rate:g}" for rate in RATES), " and ".join(map(str, MUS))
        text += f"""Searched alike for each method: rates {rates} and, where the paper makes several updates on a
rollout, mu {mus}; on validation problems of {", ".join(TUNING_TASKS)}, seed 0, from SFT, at half the compute. The
figures are percent solved there. A method of one update has half as many tries.

{settings_table(board)}\n"""
    else:
        text += "Nothing was searched: one rate for all, so this ranks mostly how well that rate suits each.\n\n"
    text += f"## What it means\n\n{reading(path)}\n"
    path.write_text(text)
    return f"{board.done} of {board.planned} runs are done. Tables: {path}"


def reasons(board: Board) -> str:
    text = ""
    if len(board.setups) > 1:
        text += f"""## What goes with a high place

Spearman's rank correlation over methods of the accuracy at the end with the tuned rate, a run's rollouts, updates and
KL, and with the accuracy in the other setups; p-values as they are.

{correlations_table(board.results, board.setups)}\n"""
    if board.changes:
        done, planned = len(board.changes), len(board.changed)
        partial = f" **Partial: {done} of {planned}.**" * (done < planned)
        text += f"""## One choice at a time

{REFERENCE} at its own rate and mu and the same compute, with one of its choices changed to what other methods have.
Differences are paired by seed and problem; the p-values are Holm's over this table.{partial}

{changes_table(board.results, board.changes)}\n"""
    return text
