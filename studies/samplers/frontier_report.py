"""The table and the figure of docs/samplers.md and the tables of README.md, from data/frontier.jsonl."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from pathlib import Path

from d1.runs.tables import markdown_table
from d1.sampling.caches import CACHES
from d1.show.curves import MARKED, WIDTH, legend, panels, save_figure
from pocket.recipes import ROOT
from pocket.uncertainty import Mean, mean_of
from studies.distill.teachers import SEEDS, TASKS
from studies.reports import percent, points
from studies.samplers.frontier import (
    EXACT,
    MARGIN,
    REFERENCES,
    Line,
    chosen,
    family,
    frontier,
    lines_of,
    mean_over,
)
from studies.samplers.measure import accuracy, aup, outcomes

PAGE, FIGURE = ROOT / "docs" / "samplers.md", ROOT / "docs" / "samplers.svg"
README = Path(__file__).with_name("README.md")
TICKS = (100, 200, 400, 800)  # computed tokens
SHOWN = 5.0  # points below exact on validation problems, down to which a table shows the frontier of all settings
HEAD = ["sampler", "solved, % [95%]", "minus exact [95%]", "computed tokens", "fewer", "passes", "TPF", "ms"]


def against(lines: Sequence[Line], name: str, reference: str = EXACT) -> Mean:
    own, other = ([line["samplers"][one] for line in lines] for one in (name, reference))
    return mean_of(outcomes(own) - outcomes(other))


def row(lines: Sequence[Line], name: str, mark: str = "") -> list[str]:
    computed, passes = (mean_over(lines, name, value) for value in ("computed", "passes"))
    cells = [f"{mark}{name}", percent(mean_of(outcomes(line["samplers"][name] for line in lines)))]
    cells += ["" if name == EXACT else points(against(lines, name)), f"{computed:.0f}"]
    cells += [f"{mean_over(lines, EXACT, 'computed') / computed:.1f}", f"{passes:.2f}"]
    return [
        *cells,
        f"{mean_over(lines, name, 'tokens') / passes:.1f}",
        f"{1000 * mean_over(lines, name, 'seconds'):.1f}",
    ]


def sentence(task: str, lines: Sequence[Line], name: str | None, reference: str) -> str:
    """The result, on fresh problems, of a setting chosen on validation problems."""
    if name is None:
        return f"{task.capitalize()}: no setting is within {MARGIN:g} point of {reference} on validation problems.\n"
    found, fewer = (
        against(lines, name, reference),
        mean_over(lines, EXACT, "computed") / mean_over(lines, name, "computed"),
    )
    return (
        f"{task.capitalize()}, within {MARGIN:g} point of {reference} on validation problems: `{name}`, {fewer:.1f} "
        f"times fewer computed tokens, {points(found)} points on fresh problems; {len(lines)} seeds are not tested.\n"
    )


def of_task(task: str) -> list[str]:
    """The table of a task and what is said of its choices; empty if a model is missing."""
    validation, test = lines_of(task, "validation"), lines_of(task, "test")
    if min(len(validation), len(test)) < len(SEEDS):
        return []
    choices = {reference: chosen(validation, reference) for reference in REFERENCES}
    least = mean_over(validation, EXACT, "accuracy") - SHOWN
    best = frontier(validation, (name for name in test[0]["samplers"] if name not in REFERENCES), "computed")
    names = {name for name in best if mean_over(validation, name, "accuracy") >= least}
    names |= {name for name in choices.values() if name}
    rows = [row(test, name) for name in REFERENCES]
    for name in sorted(names, key=lambda name: -mean_over(test, name, "computed")):
        rows.append(row(test, name, "**chosen**: " * (name in choices.values())))
    said = [sentence(task, test, name, reference) for reference, name in choices.items()]
    return [f"### {task}\n", *said, markdown_table(HEAD, rows)]


def chosen_table() -> str:
    """The page's table: per task, the references and what was chosen on validation problems, also without a cache."""
    rows = []
    for task in TASKS:
        validation, test = lines_of(task, "validation"), lines_of(task, "test")
        if min(len(validation), len(test)) == len(SEEDS):
            choices = [chosen(validation, reference) for reference in REFERENCES]
            names = dict.fromkeys([*REFERENCES, *choices, chosen(validation, EXACT, "no cache")])
            for name, solved, minus_exact, _, fewer, passes, *_ in (row(test, name) for name in names if name):
                rows.append([task, name, solved, minus_exact, fewer, passes])
    return markdown_table(["task", *HEAD[:3], *HEAD[4:6]], rows)


def areas() -> str:
    """AUP of exact and every cache's judged settings: mean and standard deviation of the seeds."""
    rows = []
    for task in TASKS:
        lines = lines_of(task, "test")
        highest = max(accuracy(one) for line in lines for one in line["samplers"].values())
        for cache in ("no cache", *CACHES):
            names = [name for name in lines[0]["samplers"] if family(name) == cache]
            found = [aup({name: line["samplers"][name] for name in (EXACT, *names)}, highest) for line in lines]
            rows.append([task, cache, f"{statistics.fmean(found):.0f} ± {statistics.stdev(found):.0f}"])
    return "### Area under accuracy against TPF (AUP)\n\n" + markdown_table(
        ["task", "cache", "AUP ± standard deviation"], rows
    )


def left() -> int:
    """The parts of the study that are not measured."""
    planned = 2 * len(TASKS) * len(SEEDS)
    return planned - sum(len(lines_of(task, split)) for task in TASKS for split in ("validation", "test"))


def figure(path: Path = FIGURE) -> None:
    """Plots accuracy against computed tokens, a colour and marker per cache; nothing while parts are missing."""
    if left():
        return
    drawn, axes = panels(1, len(TASKS), size=(WIDTH, 3.6))
    for axis, task in zip(axes, TASKS, strict=True):
        lines = lines_of(task, "test")
        for style, cache in zip(MARKED, ("exact", "no cache", *CACHES), strict=False):
            names = [name for name in lines[0]["samplers"] if family(name) == cache]
            tokens, solved = ([mean_over(lines, name, value) for name in names] for value in ("computed", "accuracy"))
            axis.plot(tokens, solved, linestyle="", markersize=7 if cache == "exact" else 4.5, label=cache, **style)
        axis.set_xscale("log")
        axis.set_xticks(TICKS, [str(tick) for tick in TICKS], minor=False)
        axis.set_xticks([], minor=True)
        axis.set(title=task, xlabel="computed tokens per problem", ylabel="fresh problems solved, %")
    legend(drawn, columns=6)
    save_figure(drawn, path)


def parts() -> dict[Path, str]:
    """Page -> the part of it that is written."""
    missing = f"{left()} parts are not measured yet; `python -m studies.samplers.frontier` continues.\n"
    tables = [part for task in TASKS for part in of_task(task)]
    tables.append(missing if left() else areas())
    return {PAGE: chosen_table(), README: "\n".join(tables)}
