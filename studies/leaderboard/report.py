"""Writes docs/leaderboard.md and its two figures from data/: the final table, which alone reads the sealed outcomes.

python -m studies.leaderboard.report    # also part of `make studies`
"""

from __future__ import annotations

import argparse
from collections.abc import Collection, Iterable, Iterator
from contextlib import suppress
from dataclasses import dataclass, replace
from itertools import product
from pathlib import Path
from statistics import fmean
from typing import NamedTuple

import numpy as np

from d1.rl.methods import METHODS
from d1.runs.entry import run_script
from d1.show.tables import markdown_table
from pocket.recipes import ROOT
from studies.leaderboard.bootstrap import (
    Order,
    interval,
    not_worse,
    order,
    p_value,
    rank_correlations,
    resampled_means,
)
from studies.leaderboard.figures import draw_curves, draw_places
from studies.leaderboard.parts import PARTS, every_seed, short
from studies.leaderboard.plan import CANDIDATES, FULL, REFERENCE, SETUPS, START, Protocol, Run, Setup
from studies.leaderboard.results import DATA, Line, read_results
from studies.leaderboard.texts import CANDIDATE, CURVES, EIGHT_BILLION, INTRODUCTION, PLACES, SEARCH
from studies.leaderboard.variants import row_of
from studies.pages import reading
from studies.statistics import Interval, holm, percent, points

PAGE = ROOT / "docs" / "leaderboard.md"


class Place(NamedTuple):
    """A method in a table, by the judge "exact"; `less` is its difference to d1."""

    solved: Interval
    less: Interval
    not_worse: bool
    seeds: int


@dataclass(frozen=True)
class Table:
    """A setup at a budget.

    Attributes:
        runs: method -> seed -> the line of the run; `START` is among the methods.
        places: by method, the most accurate first.
        order: of the methods that have all seeds.
        few: why a method is planned with fewer seeds.
    """

    setup: Setup
    budget: int
    runs: dict[str, dict[int, Line]]
    places: dict[str, Place]
    order: Order
    few: dict[str, str]


def outcomes(lines: dict[int, Line], seeds: Iterable[int], judge: str = "exact") -> np.ndarray:
    """(seeds, problems) of 0 and 1. A start without SFT has one model, whatever the seed."""
    texts = [lines[seed if seed in lines else 0]["sealed"][judge] for seed in seeds]
    return np.array([[*map(int, text)] for text in texts])


def tables_of(results: dict[Run, Line], protocol: Protocol) -> Iterator[Table]:
    """The tables in which every planned method has its first seeds; candidates have ranks once all runs are done."""
    held = CANDIDATES if protocol.missing(results) else ()
    for setup, budget in product(protocol.setups, reversed(protocol.budgets)):
        few = protocol.fewer_seeds(protocol.choices(results, setup))
        planned = [name for name in protocol.methods if budget == protocol.budgets[0] or name not in few]
        runs: dict[str, dict[int, Line]] = {}
        for run, line in results.items():
            named = run.method in (*planned, START)
            if named and run.stage == "final" and run.setup == setup and run.budget in (budget, 0):
                runs.setdefault(run.method, {})[run.seed] = line
        if START in runs and all({*range(protocol.few)} <= runs.get(name, {}).keys() for name in planned):
            places, (p_values, ranks, ties) = placed(runs, protocol, few)
            ranks = {name: rank for name, rank in ranks.items() if name not in held}
            yield Table(setup, budget, runs, places, Order(p_values, ranks, [tie - {*held} for tie in ties]), few)


def placed(
    runs: dict[str, dict[int, Line]], protocol: Protocol, fewer: Collection[str]
) -> tuple[dict[str, Place], Order]:
    """The places of all methods: those with all seeds on these, the others on the first few. Differences to d1 are on
    the seeds that both have. There is an order only once all methods that are not in `fewer` have all seeds."""
    groups = {
        seeds: [name for name in runs if set(seeds) <= runs[name].keys() or (name, len(runs[name])) == (START, 1)]
        for seeds in (tuple(range(protocol.seeds)), tuple(range(protocol.few)))
    }
    scores = {
        seeds: np.stack([outcomes(runs[name], seeds) for name in names]) for seeds, names in groups.items() if names
    }
    means = {seeds: dict(zip(groups[seeds], of.mean((1, 2)), strict=True)) for seeds, of in scores.items()}
    draws = {seeds: dict(zip(groups[seeds], resampled_means(of), strict=True)) for seeds, of in scores.items()}
    every, few = groups
    places = {}
    for name in groups[few]:
        own = every if name in groups[every] else few
        shared = own if REFERENCE in groups[own] else few
        less = draws[shared][name] - draws[shared][REFERENCE]
        difference = interval(means[shared][name] - means[shared][REFERENCE], less)
        places[name] = Place(interval(means[own][name], draws[own][name]), difference, not_worse(less), len(own))
    in_order = dict(sorted(places.items(), key=lambda item: -item[1].solved.value))
    ranked = [name for name in runs if name not in (START, *fewer)]
    ranked = ranked if {*ranked} <= {*groups[every]} else []
    compared = order({name: means[every][name] for name in ranked}, {name: draws[every][name] for name in ranked})
    return in_order, compared


def places_table(table: Table) -> str:
    """What the final table says of a setup and budget; methods that share a letter are not separated."""
    rows = []
    for name, place in table.places.items():
        complete = name in table.order.ranks or name in table.few
        letters = "".join(chr(97 + number) for number, tie in enumerate(table.order.ties) if name in tie)
        own = outcomes(table.runs[name], range(place.seeds), "own").mean() if name != START else None
        rows.append(
            [
                "the start itself" if name == START else short(name),
                str(place.seeds),
                percent(place.solved),
                rank_of(table, name),
                letters,
                "" if name == REFERENCE else points(place.less),
                "" if name == REFERENCE or not complete else "yes" if place.not_worse else "no",
                "" if own is None else f"{100 * own:.1f}",
            ]
        )
    header = ["method", "seeds", "solved, %", "rank", "ties", f"difference to {REFERENCE}"]
    return markdown_table([*header, f"not worse than {REFERENCE}", "own sampler, %"], rows)


def rank_of(table: Table, name: str) -> str:
    """The ranks that are open for a method, or why it has none."""
    if rank := table.order.rank(name):
        return rank
    waits = "not before all runs are done" if name in CANDIDATES else "not all seeds yet"
    return "" if name == START else table.few.get(name, waits)


def cost_table(table: Table) -> str:
    """What the runs were: settings, work, distance from the start; means over seeds."""
    rows = []
    for name in table.places:
        if name == START:
            continue
        lines = [*table.runs[name].values()]
        kls = [line["kl"] for line in lines if line["kl"] is not None]
        rows.append(
            [
                name,
                f"{lines[0]['learning_rate']:g}, {lines[0]['num_iterations']}",
                f"{average(lines, 'rollouts'):.0f}",
                f"{average(lines, 'steps'):.0f}",
                f"{100 * average(lines, 'overshoot') / table.budget:.1f}",
                f"{fmean(kls):.3f}" if kls else "",
                f"{average(lines, 'processor_seconds'):.0f}",
                f"{sum(line['diverged'] for line in lines)} of {len(lines)}",
            ]
        )
    header = ["method", "rate, updates", "rollouts", "steps", "over budget, %", "KL to start", "processor seconds"]
    return markdown_table([*header, "diverged"], rows)


def average(lines: list[Line], field: str) -> float:
    return fmean(line[field] for line in lines)


def wins_table(tables: list[Table]) -> str:
    """Each candidate against every published method, in every setup at both budgets; Holm over all of them."""
    compared = []
    for table, candidate in product(tables, CANDIDATES):
        if candidate not in table.places:
            continue
        for other in (name for name in table.places if name not in (*CANDIDATES, START)):
            seeds = sorted(table.runs[candidate].keys() & table.runs[other].keys())
            scores = np.stack([outcomes(table.runs[name], seeds) for name in (candidate, other)])
            ours, theirs = resampled_means(scores)
            gain = interval(scores[0].mean() - scores[1].mean(), ours - theirs)
            place = f"{table.setup.label}, {table.budget:,}"
            compared.append((candidate, place, other, gain, p_value(ours - theirs)))
    adjusted = holm([p for *_, p in compared])
    rows = [[*names, points(gain), f"{p:.2g}"] for (*names, gain, _), p in zip(compared, adjusted, strict=True)]
    return markdown_table(["candidate", "setup", "against", "difference", "Holm's p"], rows) if rows else ""


def search_table(results: dict[Run, Line], protocol: Protocol) -> str:
    """The rate and number of updates that the search chose, the share of validation problems solved with them, and its
    mean over the setups."""
    rows, choices = [], [protocol.choices(results, setup) for setup in protocol.setups]
    for method in protocol.methods:
        found = [of.get(method) for of in choices]
        cells = [
            f"{one.learning_rate:g}, {one.num_iterations}: {100 * one.accuracy:.1f}" if one else "" for one in found
        ]
        known = [one.accuracy for one in found if one]
        mean = f"{100 * fmean(known):.1f}" if len(known) == len(found) else ""
        rows.append([short(method), str(METHODS[row_of(method)].scale.get("learning_rate", "")), *cells, mean])
    return markdown_table(["method", "its authors' rate", *(setup.label for setup in protocol.setups), "mean"], rows)


def order_kept(small: Table, large: Table) -> Interval:
    """Spearman's correlation of two tables over the methods and seeds of the second, with its interval."""
    names = [name for name in large.places if name != START and name in small.runs]
    seeds = sorted(set.intersection(*({*table.runs[name]} for table in (small, large) for name in names)))
    of_tables = [np.stack([outcomes(table.runs[name], seeds) for name in names]) for table in (small, large)]
    (value,) = rank_correlations(*(scores.mean((1, 2))[:, None] for scores in of_tables))
    draws = rank_correlations(*(resampled_means(scores, seed=seed) for seed, scores in enumerate(of_tables)))
    return interval(value, draws)


def parts_text(results: dict[Run, Line]) -> str:
    """The protocol's further parts, once the search has said what they compare."""
    parts: dict[str, Protocol] = {}
    for name in ("candidates", "way", "scale"):
        with suppress(ValueError):  # the search is not complete
            parts[name] = PARTS[name](results)
    text = ""
    if part := parts.get("candidates"):
        text += f"## The search of a candidate\n\n{CANDIDATE}\n\n{search_table(results, part)}\n"
    if part := parts.get("way"):
        for table in tables_of(results, part):
            table = replace(table, places={name: table.places[name] for name in (START, *part.methods)})
            text += f"## From {REFERENCE} to the best method\n\n{places_table(table)}\n"
    if part := parts.get("scale"):
        for table in tables_of(results, part):
            (small,) = tables_of(results, every_seed(part.methods, SETUPS["sudoku-sft"]))
            kept = "{:+.2f} [{:+.2f}, {:+.2f}]".format(*order_kept(small, table))
            text += f"## On a model with ten times as many parameters\n\n{places_table(table)}\n"
            text += f"Spearman's correlation with the small model's accuracies: {kept}.\n\n"
    return text


def of_every_setup(tables: list[Table], protocol: Protocol) -> list[Table]:
    """The tables of the largest budget at which every setup has one; an empty list if there is none."""
    for budget in reversed(protocol.budgets):
        found = [table for table in tables if table.budget == budget]
        if len(found) == len(protocol.setups):
            return found
    return []


def page(results: dict[Run, Line], tables: list[Table], protocol: Protocol, path: Path) -> str:
    missing = len(protocol.missing(results))
    cut = f"**The board is not complete: {missing} runs are missing or wait for others.**\n\n" if missing else ""
    shown = of_every_setup(tables, protocol)
    figures = PLACES.format(budget=shown[0].budget) if shown else ""
    figures += CURVES if shown and shown[0].budget == protocol.budgets[-1] else ""
    text = INTRODUCTION.format(cut=cut, figures=figures, reading=reading(path), runs=len(results)) + EIGHT_BILLION
    for table in tables:
        text += f"## {table.setup.task} from {table.setup.start}, {table.budget:,} tokens\n\n{places_table(table)}\n"
    if not missing and (wins := wins_table(tables)):
        text += f"## Candidates of our own\n\n{wins}\n"
    text += parts_text(results)
    text += f"## The search\n\n{SEARCH}\n\n{search_table(results, protocol)}\n"
    text += "## What the runs were\n\n" if tables else ""
    for table in tables:
        text += f"### {table.setup.task} from {table.setup.start}, {table.budget:,}\n\n{cost_table(table)}\n"
    return text.rstrip() + "\n"


def write(data: Path, path: Path, protocol: Protocol = FULL) -> None:
    """Writes the page at `path` and its figures."""
    results = read_results(data, final_table=True)
    tables = [*tables_of(results, protocol)]
    path.parent.mkdir(parents=True, exist_ok=True)
    if shown := of_every_setup(tables, protocol):
        draw_places(shown, path.with_suffix(".png"))
        if shown[0].budget == protocol.budgets[-1]:
            draw_curves(shown, path.with_name(f"{path.stem}_curves.png"))
    path.write_text(page(results, tables, protocol, path))


def main(args: argparse.Namespace) -> None:
    write(args.data, args.output)


def make_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", type=Path, default=DATA, help="folder of the runs' lines")
    parser.add_argument("--output", type=Path, default=PAGE, help="the page; its figures stand next to it")
    return parser


if __name__ == "__main__":
    run_script("studies.leaderboard.report", lambda: main(make_parser().parse_args()))
