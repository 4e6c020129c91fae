"""Writes the leaderboard's tables and figures from data/: the final table, which alone reads the sealed outcomes.

python -m studies.leaderboard.report    # also part of `make studies`

The pages are docs/leaderboard.md and, in this folder, SEARCH.md, EXPLANATIONS.md and RUNS.md.
"""

from __future__ import annotations

import argparse
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from statistics import fmean

from d1.runs.cli import run_script
from d1.show.tables import markdown_table
from pocket.recipes import ROOT
from pocket.uncertainty import LEAST_SEEDS
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
from studies.leaderboard.variants import BOARD, changed_since, entry_of
from studies.reports import percent, points, write_part

PAGE = ROOT / "docs" / "leaderboard.md"
SEARCH, EXPLANATIONS, RUNS = (DATA.with_name(f"{name}.md") for name in ("SEARCH", "EXPLANATIONS", "RUNS"))


def places_table(table: Table) -> str:
    """What the final table says of a setup and budget."""
    rows = []
    for name, place in table.places.items():
        less = "" if name == REFERENCE else points(place.less)
        rows.append([named(name), percent(place.solved), less, rank_of(table, name)])
    return markdown_table(["method", "solved, %", f"minus {REFERENCE}", "rank"], rows)


def summary_table(tables: list[Table]) -> str:
    """In how many tables each method is where, of those in which it has all seeds."""
    rows = []
    for name in dict.fromkeys(name for table in tables for name in table.order.ranks if name != REFERENCE):
        own = [table for table in tables if name in table.order.ranks]
        count = [
            len(own),
            sum(next(iter(table.places)) == name for table in own),
            sum(not separated(table, next(iter(table.order.ranks)), name) for table in own),
            sum(table.places[name].less.low > 0 for table in own),
            sum(separated(table, name, REFERENCE) for table in own),
        ]
        rows.append([named(name), *map(str, count)])
    rows.sort(key=lambda row: [-int(count) for count in reversed(row[1:])])
    return markdown_table(["method", "tables", *COUNTED], rows)


def tables_table(tables: list[Table]) -> str:
    """How many methods of each table are above d1."""
    rows = []
    for table in tables:
        others = [place for name, place in table.places.items() if name not in (START, REFERENCE)]
        above = sum(place.less.low > 0 for place in others), sum(separated(table, n, REFERENCE) for n in table.places)
        rows.append([title_of(table), *map(str, (len(others), len(table.order.ranks) - 1, *above))])
    return markdown_table(["setup and budget", "others", "tested", *COUNTED[2:]], rows)


def title_of(table: Table) -> str:
    return f"{table.setup.task} from {table.setup.start}, {table.budget:,} tokens"


def separated(table: Table, better: str, worse: str) -> bool:
    """Whether a method is separated from another one and better."""
    return table.order.p_values.get((better, worse), 1.0) < LEVEL


def named(method: str) -> str:
    return "the start" if method == START else short(method)


def rank_of(table: Table, name: str) -> str:
    """The ranks that are open for a method and the letters of its ties, or why it has none."""
    if rank := table.order.rank(name):
        letters = "".join(chr(97 + number) for number, tie in enumerate(table.order.ties) if name in tie)
        return f"{rank.replace(' to ', '-')}, {letters}"
    waits = "not before all runs are done" if name in CANDIDATES else "not all seeds yet"
    waits = "not tested" if table.places[name].seeds < LEAST_SEEDS else waits
    return "" if name == START else table.few.get(name, waits)


def runs_table(table: Table) -> str:
    """What the runs were: settings, work, distance from the start, and what the page leaves out; means over seeds."""
    rows, reference = [], table.runs[REFERENCE]
    for name, place in table.places.items():
        if name == START:
            continue
        lines, paired = [*table.runs[name].values()], [reference[seed] for seed in table.runs[name]]
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
                f"{average(lines, 'processor_seconds') / average(paired, 'processor_seconds'):.2f}",
                f"{sum(line['diverged'] for line in lines)} of {len(lines)}",
                f"{100 * outcomes(table.runs[name], range(place.seeds), 'own').mean():.1f}",
                "" if name == REFERENCE else {None: "not tested", True: "yes", False: "no"}[place.not_worse],
            ]
        )
    header = ["method", "rate, updates", "rollouts", "steps", "over budget, %", "KL to start", "processor seconds"]
    header += [f"times {REFERENCE}'s"]
    return markdown_table([*header, "diverged", "own sampler, %", f"not worse than {REFERENCE}"], rows)


def average(lines: list[Line], field: str) -> float:
    return fmean(line[field] for line in lines)


def duels_text(tables: list[Table]) -> str:
    """Whether a candidate tops the board, by the protocol's test, and all differences that it rests on."""
    found, counts = duels(tables), []
    for candidate in dict.fromkeys(duel.candidate for duel in found):
        own = [duel for duel in found if duel.candidate == candidate]
        tested = sum(duel.difference.p is not None for duel in own)
        counts.append([candidate, *map(str, (len(own), tested, sum(duel.won for duel in own)))])
    text = markdown_table(["candidate", "comparisons", "tested", "won"], counts)
    header = ["candidate", "setup", "against", "difference", "Holm's p"]
    rows = []
    for candidate, table, other, difference in found:
        setup = f"{table.setup.label}, {table.budget:,}"
        p = "not tested" if difference.p is None else f"{difference.p:.2g}"
        rows.append([candidate, setup, other, points(difference), p])
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
        rows.append([short(method), str(BOARD[entry_of(method)]["learning_rate"]), *cells, mean])
    return markdown_table(["method", "its authors' rate", *(setup.label for setup in protocol.setups), "mean"], rows)


def explanations(results: dict[Run, Line]) -> str:
    """The parts "way" and "scale" of the protocol, once the search has said what they compare."""
    text = ""
    with suppress(ValueError):  # the search is not complete
        part = PARTS["way"](results)
        for table in tables_of(results, part):
            table = replace(table, places={name: table.places[name] for name in (START, *part.methods)})
            text += f"## From {REFERENCE} to the best method\n\n{WAY}\n\n{places_table(table)}\n{runs_table(table)}\n"
        part = PARTS["scale"](results)
        for table in tables_of(results, part):
            (small,) = tables_of(results, every_seed(part.methods, SETUPS["sudoku-sft"]))
            kept = "{:+.2f} [{:+.2f}, {:+.2f}]".format(*order_kept(small, table))
            text += f"## On a model with ten times as many parameters\n\n{SCALE}\n\n{places_table(table)}\n"
            text += f"Spearman's correlation with the small model's accuracies: {kept}.\n\n{runs_table(table)}\n"
    return text


def searches(results: dict[Run, Line], tables: list[Table], protocol: Protocol) -> str:
    """The board's search; then the candidate's, and how it compares once all runs are done."""
    text = f"## The search of rates and updates\n\n{RATES}\n\n{search_table(results, protocol)}\n"
    with suppress(ValueError):  # the search is not complete
        part = PARTS["candidates"](results)
        text += f"## The search of a candidate\n\n{CANDIDATE}\n\n{search_table(results, part)}\n"
    compared = "" if protocol.missing(results) else duels_text(tables)
    return text + f"## The candidate on sealed problems\n\n{compared}\n" * bool(compared)


def of_every_setup(tables: list[Table], protocol: Protocol) -> list[Table]:
    """The tables of the largest budget at which every setup has one; an empty list if there is none."""
    for budget in reversed(protocol.budgets):
        found = [table for table in tables if table.budget == budget]
        if len(found) == len(protocol.setups):
            return found
    return []


def parts(results: dict[Run, Line], tables: list[Table], protocol: Protocol = FULL) -> dict[Path, str]:
    """Page -> the part of it that is written."""
    missing = len(protocol.missing(results))
    text = f"**The board is not complete: {missing} runs are missing or wait for others.**\n\n" if missing else ""
    text += f"From {len(results):,} runs.{changed_text()}\n\n{summary_table(tables)}"
    runs = f"## Above {REFERENCE}\n\n{tables_table(tables)}\n"
    for table in tables:
        runs += f"## {title_of(table)}\n\n{places_table(table)}\n{runs_table(table)}\n"
    written = {PAGE: text, SEARCH: searches(results, tables, protocol), EXPLANATIONS: explanations(results), RUNS: runs}
    return {page: part.rstrip() + "\n" for page, part in written.items()}


def changed_text() -> str:
    names = ", ".join(changed_since())
    return f" Entries that have changed since they were run: {names}." if names else ""


COUNTED = (
    "highest mean",
    "not separated from it",
    f"interval above {REFERENCE}",
    f"separated above {REFERENCE}",
)


def write(data: Path = DATA) -> None:
    """Writes the pages and the figures."""
    results = read_results(data, final_table=True)
    tables = [*tables_of(results, FULL)]
    if shown := of_every_setup(tables, FULL):
        draw_places(shown, PAGE.with_suffix(".svg"))
        if shown[0].budget == FULL.budgets[-1]:
            draw_curves(shown, PAGE.with_name(f"{PAGE.stem}_curves.svg"))
    for page, text in parts(results, tables).items():
        write_part(page, text)


RATES = """Per setup: the rate and number of updates that were chosen on validation problems, and the percentage of
these that the models solved then (mean of two seeds, at the smaller budget). A choice among several looks better than
it is."""
CANDIDATE = """The best entry of the search with one change each, then the best of these with one more, on three setups.
The entry with the highest mean is the candidate."""
DUELS = """Differences to every published method in every setup and at both budgets, on the seeds that both have. Holm's
p-values are over all that are tested, with five seeds or more. A candidate tops the board if each difference is above 0
with a p-value below 0.05."""
WAY = """Sudoku from SFT at the smaller budget. d1 gets one idea of the search's best entry at a time, then the first
two, three and so on; each variant is tuned like a method. [variants.py](variants.py) says which settings an idea
has."""
SCALE = """Sudoku from SFT at the smaller budget, a model of 2.1 million parameters: d1 and the five best entries of the
search on the small model, tuned anew, with four seeds."""


def make_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", type=Path, default=DATA, help="folder of the runs' lines")
    return parser


if __name__ == "__main__":
    run_script("studies.leaderboard.report", lambda: write(make_parser().parse_args().data))
