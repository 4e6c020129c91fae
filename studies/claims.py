"""Claims of the pages: what a sentence compares, computed from the data of the studies.

A claim is a comment after the number or the words that it belongs to:

    solve 5.3 [2.4, 8.1]<!--claim: factorial/sudoku-sft: prompt+rollouts > none--> points more

`SOURCE: A OP B` compares two arms of a source, paired by seed and problem; `SOURCE: effect NAME OP 0` is a contrast
that the source defines. `archived/HEADING: cell ROW/COLUMN OP 0` is an interval in a table of docs/studies.md. The
operators, and what has to hold:

- `>` and `<`: the 95% interval of A minus B excludes 0 on that side;
- `~`: it contains 0;
- `=`: it lies inside 2 points, the margin of the protocols, and the sentence says so;
- `>=` and `<=`: the means have this order, and the sentence says "mean".

`tests/studies/test_claims.py` reads the pages with `wrong_claims`.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from functools import cache
from statistics import fmean
from typing import Any, NamedTuple

from scipy import stats

from pocket.recipes import ROOT
from studies.json_lines import read_lines
from studies.reports import paired_difference, scores

VALUE = r"(?<![\w.])[-+]?\d*\.?\d+(?: \[[^\]]*\])?"
CLAIM = re.compile(rf"(?P<value>{VALUE})?%?<!--claim: (?P<source>[^:>]+): (?P<claim>[^>]*?(?:>=|<=|>|<|~|=)[^>]*?)-->")
OPERATION = re.compile(r"^(?P<first>.+?) (?P<operator>>=|<=|>|<|~|=) (?P<second>.+)$")
# Words of a sentence, of which one has to be there, by operator.
WORDS = {
    ">": r"more|gains?|above|better|pays?|adds?|raises?|beats?|highest|higher|than",
    "<": r"less|loses?|loss|below|worse|fewer|costs?|lower",
    "~": r"not\s+separated|not shown|not excluded|includes 0|contains 0|neither|open",
    "=": r"equal within 2 points",
    ">=": r"mean",
    "<=": r"mean",
}
AT_EQUAL = re.compile(r"[Aa]t (?:equal|the same) (?:number of )?(tokens|processor seconds|updates)")
COSTS = {"tokens": "compute", "processor seconds": "processor_seconds", "updates": "steps"}
MARGIN = 2  # points
EQUAL_COST = 1.1  # costs that differ by less count as equal

Line = Mapping[str, Any]


class Contrast(NamedTuple):
    """A difference in points with its 95% interval, and the mean cost of both sides by the names of `COSTS`."""

    value: float
    low: float
    high: float
    costs: Mapping[str, tuple[float, float]] = {}


def arms_of(source: str) -> dict[str, list[Line]]:
    """The lines of each arm of a source.

    Raises:
        ValueError: there is no such source.
    """
    study, _, part = source.partition("/")
    if study == "factorial":
        lines = [line for line in data("factorial/data/runs.jsonl") if line["setup"] == part]
        return grouped(lines, "cell")
    if study == "collapse":
        lines = data("collapse/data/third.jsonl") if part == "third" else data(f"collapse/data/{part}.jsonl")
        if part == "third":
            lines = [*lines, *data("collapse/data/tokens.jsonl")]
        return grouped([*lines, *data("collapse/data/reference.jsonl")], "arm")
    if study == "tools":
        return grouped([line for line in data("tools/data/runs.jsonl") if line["attention"] == part], "arm")
    if study == "smollm2" and part in ("short_sft", "second_half", "sampler_blocks", "short_rl", "samplers"):
        lines = data(f"smollm2/data/{part}.jsonl")
        if part in ("sampler_blocks", "short_rl"):
            for line in data("smollm2/data/short_sft.jsonl"):  # where they start
                lines = [*lines, {**line, "job": f"{line['job']}-trained"}]
        if part == "short_rl":  # where it starts, in other blocks
            lines = [*lines, *data("smollm2/data/sampler_blocks.jsonl")]
        return {line["job"]: [{"seed": 0, "right": line["validation"]["right"]}] for line in lines}
    if study == "smollm2":
        found: dict[str, list[Line]] = {}
        for line in data("smollm2/data/runs.jsonl"):
            if part in line and line["job"].startswith("sft-"):
                arm, seed = line["job"].removeprefix("sft-").rsplit("-", 1)
                arm = line.get("arm", arm)  # of `sft-best-1`
                found.setdefault(arm, []).append({"seed": int(seed), "right": line[part]["right"]})
        return found
    raise ValueError(f"no source {source}")


@cache
def data(path: str) -> list[dict[str, Any]]:
    return read_lines(ROOT / "studies" / path)


def grouped(lines: list[dict[str, Any]], column: str) -> dict[str, list[Line]]:
    found: dict[str, list[Line]] = {}
    for line in lines:
        found.setdefault(line[column], []).append(line)
    return found


def contrast(source: str, first: str, second: str) -> Contrast:
    """A minus B in points.

    Raises:
        ValueError: the source has no such arm or effect.
    """
    if source.startswith("pocket/"):
        return pocket_contrast(source.removeprefix("pocket/"), f"{first} - {second}")
    if source.startswith("archived/"):
        return archived_cell(source.removeprefix("archived/"), first.removeprefix("cell "))
    if first.startswith("effect "):
        return effect(source, first.removeprefix("effect "))
    arms = arms_of(source)
    for arm in (first, second):
        if arm not in arms:
            raise ValueError(f"{source} has no arm {arm}")
    by_seed = [{line["seed"]: line for line in arms[arm]} for arm in (first, second)]
    seeds = sorted(by_seed[0].keys() & by_seed[1].keys())
    sides = [[lines[seed] for seed in seeds] for lines in by_seed]
    found = paired_difference(scores(sides[0]) - scores(sides[1]))
    costs = {}
    for name, column in COSTS.items():
        if all(column in line for side in sides for line in side):
            costs[name] = (fmean(line[column] for line in sides[0]), fmean(line[column] for line in sides[1]))
    return Contrast(100 * found.value, 100 * found.low, 100 * found.high, costs)


def effect(source: str, name: str) -> Contrast:
    """A contrast that a study's report defines."""
    study = source.partition("/")[0]
    if study == "factorial":
        from studies.factorial import report as factorial

        arms = arms_of(source)
        ideas = tuple(name.split(" x "))
        found = factorial.effects({cell: scores(arms[cell]) for cell in factorial.CELLS})[ideas]
        with_it: list[Line] = []
        without: list[Line] = []
        for cell in factorial.CELLS:
            side = with_it if ideas[0] in cell.split("+") else without
            side += arms[cell]
        costs = {}
        for cost, column in COSTS.items():
            costs[cost] = (fmean(line[column] for line in with_it), fmean(line[column] for line in without))
        return Contrast(100 * found.value, 100 * found.low, 100 * found.high, costs)
    if study == "collapse":
        from studies.collapse import report as collapse

        every = collapse.effects(collapse.cells_of(collapse.third_lines()))
        (key,) = (key for key in every if key.startswith(name))
        return Contrast(100 * every[key].value, 100 * every[key].low, 100 * every[key].high)
    raise ValueError(f"{source} defines no effects")


def archived_cell(heading: str, name: str) -> Contrast:
    """The interval in a table of an archived study, under a heading of docs/studies.md: ROW/COLUMN. Its table is
    compared with the archived commit by tests/studies/test_archive.py."""
    row_name, _, column = name.partition("/")
    section = (ROOT / "docs" / "studies.md").read_text().partition(f"### {heading}\n")[2].partition("\n### ")[0]
    table = [[cell.strip() for cell in line.strip("|").split("|")] for line in section.splitlines() if line[:1] == "|"]
    for row in table[2:]:
        if row[0] == row_name:
            values = [float(number) for number in re.findall(r"[-+]?\d*\.?\d+", row[table[0].index(column)])]
            value, low, high = values[:3]
            return Contrast(value, low, high)
    raise ValueError(f"docs/studies.md has no {name} under {heading}")


def pocket_contrast(table: str, name: str) -> Contrast:
    """A difference of pocket/RESULTS.md, TASK-LENGTH: Student's t over its three seeds."""
    task, _, length = table.rpartition("-")
    for row in pocket_rows(task):
        if row[:2] == [name, length]:
            seeds = [float(cell) for cell in row[2:5]]
            low, high = stats.ttest_1samp(seeds, 0).confidence_interval()
            return Contrast(fmean(seeds), float(low), float(high))
    raise ValueError(f"pocket/RESULTS.md has no difference {name} of {table}")


@cache
def pocket_rows(task: str) -> list[list[str]]:
    """The rows of paired differences of a task."""
    heading = "| paired difference" if task == "sudoku" else f"| {task}: paired difference"
    rows: list[list[str]] = []
    inside = False
    for line in (ROOT / "pocket" / "RESULTS.md").read_text().splitlines():
        if line.startswith(heading):
            inside = True
        elif not line.startswith("|"):
            inside = False
        elif inside and not line.startswith("| ---"):
            rows.append([cell.strip() for cell in line.strip("|").split("|")])
    return rows


def wrong_claims(text: str) -> list[str]:
    """What is wrong with the claims of a text."""
    found = []
    for claim in CLAIM.finditer(text):
        try:
            found += [
                f"{claim[0]}: {fault}" for fault in faults_of(claim, sentence_of(text, claim.start(), claim.end()))
            ]
        except (ValueError, KeyError) as error:
            found.append(f"{claim[0]}: {error}")
    return found


def sentence_of(text: str, start: int, end: int) -> str:
    """The sentence, list item or paragraph around a claim, without comments."""
    before = re.split(r"(?<=[.:;])\s+(?=[A-Z*`])|\n\n|\n- ", text[:start])[-1]
    after = re.split(r"(?<=[.;])\s+(?=[A-Z*`])|\n\n|\n- ", text[end:])[0]
    return re.sub(r"<!--.*?-->", "", before + " " + after)


def faults_of(claim: re.Match[str], sentence: str) -> list[str]:
    parts = OPERATION.match(claim["claim"].strip())
    if parts is None:
        raise ValueError("a claim is A OP B, with OP one of > < ~ = >= <=")
    operator = parts["operator"]
    found = contrast(claim["source"].strip(), parts["first"], parts["second"])
    faults = []
    holds = {
        ">": found.low > 0,
        "<": found.high < 0,
        "~": found.low <= 0 <= found.high,
        "=": found.low > -MARGIN and found.high < MARGIN,
        ">=": found.value >= 0,
        "<=": found.value <= 0,
    }[operator]
    shown = f"{found.value:+.1f} [{found.low:+.1f}, {found.high:+.1f}]"
    if not holds:
        faults.append(f"does not hold: {shown}")
    if claim["value"]:
        said = [float(number) for number in re.findall(r"[-+]?\d*\.?\d+", claim["value"])]
        expected = [round(number, 1) for number in (found.value, found.low, found.high)]
        turned = [-expected[0], -expected[2], -expected[1]]
        accepted = [expected] if operator in (">", ">=", "~", "=") else [expected, turned]
        if said not in [numbers[: len(said)] for numbers in accepted]:
            faults.append(f"says {claim['value']}, which is {shown}")
    if not re.search(WORDS[operator], sentence):
        faults.append(f"the sentence has none of the words {WORDS[operator]}")
    if operator in "><" and re.search(r"not\s+separated", sentence) and not re.search(r"but|;|,", sentence):
        faults.append("the sentence says not separated")
    for cost in AT_EQUAL.findall(sentence):
        if cost in found.costs:
            ours, theirs = found.costs[cost]
            if max(ours, theirs) > EQUAL_COST * min(ours, theirs):
                faults.append(f"not at equal {cost}: {ours:,.0f} and {theirs:,.0f}")
    return faults
