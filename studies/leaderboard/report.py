"""Writes docs/leaderboard.md and its two figures from data/: the final table, which alone reads the sealed outcomes.

python -m studies.leaderboard.report    # also part of `make studies`
"""

from __future__ import annotations

import argparse
from collections import Counter
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from statistics import fmean

from d1.rl.methods import METHODS
from d1.runs.entry import run_script
from d1.show.tables import markdown_table
from pocket.recipes import ROOT
from studies.leaderboard.figures import draw_curves, draw_places
from studies.leaderboard.plan import (
    CANDIDATES,
    DATA,
    FULL,
    PARTS,
    REFERENCE,
    SETUPS,
    START,
    Line,
    Protocol,
    Run,
    every_seed,
    read_results,
    short,
)
from studies.leaderboard.tables import LEVEL, Table, duels, order_kept, outcomes, tables_of
from studies.leaderboard.texts import (
    ANSWER,
    CANDIDATE,
    CURVES,
    DUELS,
    EIGHT_BILLION,
    INTRODUCTION,
    PLACES,
    SCALE,
    SEARCH,
    WAY,
)
from studies.leaderboard.variants import entry_of
from studies.pages import reading
from studies.statistics import percent, points

PAGE = ROOT / "docs" / "leaderboard.md"


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


def duels_text(tables: list[Table]) -> str:
    """Whether a candidate tops the board, by the protocol's test, and all differences that it rests on."""
    found, text = duels(tables), ""
    for candidate in dict.fromkeys(duel.candidate for duel in found):
        own = [duel for duel in found if duel.candidate == candidate]
        won = sum(duel.won for duel in own)
        verdict = "does not top" if won < len(own) else "tops"
        text += f"{candidate} {verdict} the board: it has such a difference to the other in {won} of {len(own)} rows.\n"
    header = ["candidate", "setup", "against", "difference", "Holm's p"]
    rows = []
    for candidate, table, other, difference, p in found:
        setup = f"{table.setup.label}, {table.budget:,}"
        rows.append([candidate, setup, other, points(difference), f"{p:.2g}"])
    return f"{DUELS}\n\n{text}\n{markdown_table(header, rows)}" if rows else ""


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
        rows.append([short(method), str(METHODS[entry_of(method)].scale.get("learning_rate", "")), *cells, mean])
    return markdown_table(["method", "its authors' rate", *(setup.label for setup in protocol.setups), "mean"], rows)


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
            text += f"## From {REFERENCE} to the best method\n\n{WAY}\n\n{places_table(table)}\n{cost_table(table)}\n"
    if part := parts.get("scale"):
        for table in tables_of(results, part):
            (small,) = tables_of(results, every_seed(part.methods, SETUPS["sudoku-sft"]))
            kept = "{:+.2f} [{:+.2f}, {:+.2f}]".format(*order_kept(small, table))
            text += f"## On a model with ten times as many parameters\n\n{SCALE}\n\n{places_table(table)}\n"
            text += f"Spearman's correlation with the small model's accuracies: {kept}.\n\n{cost_table(table)}\n"
    return text


def of_every_setup(tables: list[Table], protocol: Protocol) -> list[Table]:
    """The tables of the largest budget at which every setup has one; an empty list if there is none."""
    for budget in reversed(protocol.budgets):
        found = [table for table in tables if table.budget == budget]
        if len(found) == len(protocol.setups):
            return found
    return []


def answer(tables: list[Table]) -> str:
    """What to start with: the published method with the highest mean in the most tables, and what this leaves open.
    Empty while no table has an order."""
    ordered = [table for table in tables if table.order.ranks]
    highest: dict[str, list[Table]] = {}
    for table in ordered:
        published = [name for name in table.places if name in table.order.ranks and name not in CANDIDATES]
        highest.setdefault(published[0], []).append(table)
    if not highest:
        return ""
    method, *others = sorted(highest, key=lambda name: -len(highest[name]))
    said = [f"`{name}` in {len(highest[name])}: {', '.join(setups_of(highest[name]))}" for name in others]
    alone = Counter(name for table in ordered for name, rank in table.order.ranks.items() if rank == (1, 1))
    leaders = [f"`{name}` is separated from all others in {count}" for name, count in alone.items()]
    return ANSWER.format(
        method=method,
        first=len(highest[method]),
        tables=len(ordered),
        others=f" ({'; '.join(said)})" * bool(said),
        reference=REFERENCE,
        separated=sum(table.order.p_values.get((method, REFERENCE), 1.0) < LEVEL for table in ordered),
        leader="; ".join(leaders) or "No method is separated from all others in any table",
    )


def setups_of(tables: list[Table]) -> list[str]:
    return [*dict.fromkeys(f"{table.setup.task} from {table.setup.start}" for table in tables)]


def page(results: dict[Run, Line], tables: list[Table], protocol: Protocol, path: Path) -> str:
    missing = len(protocol.missing(results))
    cut = f"**The board is not complete: {missing} runs are missing or wait for others.**\n\n" if missing else ""
    shown = of_every_setup(tables, protocol)
    figures = PLACES.format(budget=shown[0].budget) if shown else ""
    figures += CURVES if shown and shown[0].budget == protocol.budgets[-1] else ""
    first = "" if missing else answer(tables)
    parts = {"cut": cut, "figures": figures, "reading": reading(path), "runs": len(results), "answer": first}
    text = INTRODUCTION.format(**parts) + EIGHT_BILLION
    for table in tables:
        text += f"## {table.setup.task} from {table.setup.start}, {table.budget:,} tokens\n\n{places_table(table)}\n"
    if not missing and (tests := duels_text(tables)):
        text += f"## Candidates of our own\n\n{tests}\n"
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
        draw_places(shown, path.with_suffix(".svg"))
        if shown[0].budget == protocol.budgets[-1]:
            draw_curves(shown, path.with_name(f"{path.stem}_curves.svg"))
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
