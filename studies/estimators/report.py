"""The tables and the figure of docs/estimators.md and the tables of README.md, from data/runs.jsonl.

All seeds of a model have the same problems. A measure is not a mean over problems, so its jackknife influences take the
place of scores (Efron and Tibshirani 1993, chapter 11): one value per problem, with the measure as their mean and the
jackknife's variance as the variance of that mean. Tables of them, or of their differences between two estimators, are
(seeds, problems), and `pocket/uncertainty.py` gives the interval over both.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from scipy.stats import norm, spearmanr

from d1.show.curves import MARKED, WIDTH, legend, panels, save_figure
from d1.show.tables import markdown_table
from pocket.recipes import ROOT
from pocket.uncertainty import LEVEL, Mean, mean_of
from studies.estimators.choices import CHOICE_OF, CHOICES, CLAIMS
from studies.estimators.run import DATA, MODELS, runs
from studies.json_lines import Run, read_lines
from studies.leaderboard.plan import FULL as BOARD
from studies.leaderboard.plan import SETUPS, TASKS, Setup, read_results
from studies.reports import Interval

PAGE, FIGURE = ROOT / "docs" / "estimators.md", ROOT / "docs" / "estimators.svg"
README = Path(__file__).with_name("README.md")
NAMES = {"base": "base", "sft": "SFT"}
PLOTTED = (
    "one step, prompt hidden by .15",
    "one step",
    "elbo, opposite, stratified",
    "replay, drawn evenly",
    "replay, drawn by entropy",
    "replay, merged",
)
FULL = {"SNR": "snr", "cosine to the bound": "cosine_to_bound", "to the trajectory": "cosine_to_trajectory"}
PREDICTORS: dict[str, Callable[[Mapping[str, Any]], float]] = {
    "cosine to the trajectory": lambda line: line["cosine_to_trajectory"],
    "cosine to the bound": lambda line: line["cosine_to_bound"],
    "deviation": lambda line: line["deviation"],
    "update / rollout": lambda line: line["cost"],
}

Key = tuple[str, int]
Lines = Mapping[int, Mapping[str, Any]]  # seed -> the line of one estimator on one model
Study = dict[Setup, dict[Key, dict[int, dict[str, Any]]]]  # model -> estimator and views -> seed -> line


def influences(value: float, without: Sequence[float]) -> np.ndarray:
    """(problems,), from a measure and its values without each problem."""
    left_out = np.array(without)
    return value + (len(left_out) - 1) * (left_out.mean() - left_out)


def influence_table(lines: Lines, measure: str, seeds: Sequence[int]) -> np.ndarray:
    """(seeds, problems) influences."""
    return np.stack([influences(lines[seed][measure], lines[seed]["without"][measure]) for seed in seeds])


def mean_over(lines: Lines, measure: str) -> Mean | None:
    """The mean over seeds; None for a measure that has no value because nothing is drawn."""
    seeds = sorted(lines)
    known = seeds and all(lines[seed][measure] is not None for seed in seeds)
    return mean_of(influence_table(lines, measure, seeds)) if known else None


def difference(lines: Lines, others: Lines, measure: str) -> Mean | None:
    """The mean difference over the seeds that both have; None without any."""
    seeds = sorted(lines.keys() & others.keys())
    return mean_of(influence_table(lines, measure, seeds) - influence_table(others, measure, seeds)) if seeds else None


def rank_correlation(a: Sequence[float], b: Sequence[float]) -> Interval | None:
    """Spearman's rank correlation of two lists of n values, with its interval by Fisher's transformation and the
    variance (1 + r^2 / 2) / (n - 3) (Bonett and Wright 2000); None below five values or if all of a list are equal."""
    if len(a) < 5 or min(np.ptp(a), np.ptp(b)) == 0:
        return None
    value = float(spearmanr(a, b)[0])
    middle = math.atanh(min(max(value, -1 + 1e-9), 1 - 1e-9))
    half = float(norm.ppf((1 + LEVEL) / 2)) * math.sqrt((1 + value**2 / 2) / (len(a) - 3))
    return Interval(value, math.tanh(middle - half), math.tanh(middle + half))


def study_of(lines: Sequence[dict[str, Any]]) -> Study:
    found: Study = {}
    for line in lines:
        own = found.setdefault(Setup(line["task"], line["model"]), {})
        own.setdefault((line["estimator"], line["views"]), {})[line["seed"]] = line
    return found


def all_models() -> list[Setup]:
    return [Setup(task, model) for task in TASKS for model in MODELS]


def cell(mean: Mean | Interval | None, signed: bool = False, most: float = math.inf) -> str:
    """0.71 [0.65, 0.77], an interval that ends at `most`; empty without a value."""
    if mean is None:
        return ""
    value, low, high = (f"{min(number, most):{'+' if signed else ''}.2f}" for number in mean[:3])
    return f"{value} [{low}, {high}]"


def measured(lines: Lines, name: str) -> str:
    return cell(mean_over(lines, name), most=math.inf if name == "snr" else 1.0)


def left_of(lines: Sequence[Mapping[str, Any]]) -> list[Run]:
    """The planned lines that are not measured."""
    there = [{name: line[name] for name in runs()[0]} for line in lines]
    return [run for run in runs() if run not in there]


def status(lines: Sequence[Mapping[str, Any]]) -> str:
    planned, missing = runs(), left_of(lines)
    total, left = (len({(run["task"], run["model"], run["seed"]) for run in of}) for of in (planned, missing))
    told = (
        f"{len(planned) - len(missing)} of {len(planned)} planned lines are measured, {total - left} of {total} models"
    )
    return f"{told} completely. {UNFINISHED if missing else ''}".rstrip() + "\n"


def claims(study: Study) -> str:
    """One row per comparison, one column per model: differences with their intervals."""
    models = [setup for setup in all_models() if setup in study]
    rows = []
    for claim in CLAIMS:
        pairs = [[study[setup].get(key, {}) for key in (claim.choice, claim.other)] for setup in models]
        found = [difference(own, other, claim.measure) for own, other in pairs]
        rows += [[claim.title, *(cell(mean, signed=True) for mean in found)]] * any(found)
    return markdown_table(["difference of cosines", *(f"{one.task}, {NAMES[one.start]}" for one in models)], rows)


def cost(lines: Lines) -> str:
    return f"{statistics.fmean(line['cost'] for line in lines.values()):.2f}" if lines else ""


def full(setup: Setup, of: Mapping[Key, Lines]) -> str:
    """All measurements of a model."""
    common = [next(iter(lines.values())) for lines in of.values()]
    errors = ", ".join(f"{100 * error:.0f}%" for error in sorted({line["bound_error"] for line in common}))
    rows = []
    for choice in CHOICES:
        if lines := of.get(choice.key):
            means = {
                name: statistics.fmean(line[name] for line in lines.values())
                for name in ("bias_to_bound", "bias_to_trajectory", "deviation")
            }
            signed = [f"{value:.3f}" if name == "deviation" else f"{value:+.3f}" for name, value in means.items()]
            intervals = [measured(lines, name) for name in FULL.values()]
            rows.append([choice.name, str(choice.views), str(len(lines)), cost(lines), *signed, *intervals])
    head = ["estimator", "views", "seeds", "update / rollout", "bias to bound", "to trajectory", "deviation", *FULL]
    told = f"Relative standard error of the bound's gradient: {errors}.\n\n"
    return f"## {setup.task}, {NAMES[setup.start]}\n\n{told}{markdown_table(head, rows)}"


def prediction(study: Study, accuracies: Mapping[Setup, Mapping[str, float]]) -> str:
    """Rank correlations of an estimator's measures with the accuracy of its methods, one row per setup of the
    leaderboard; empty without its search. Methods with the same estimator count once, with their mean accuracy."""
    rows = []
    for setup, ends in accuracies.items():
        of: dict[Key, list[float]] = {}
        for method, key in CHOICE_OF.items():
            if method in ends and key in study.get(setup, {}):
                of.setdefault(key, []).append(ends[method])
        reached = [statistics.fmean(values) for values in of.values()]
        cells = []
        for value in PREDICTORS.values():
            own = [statistics.fmean(map(value, study[setup][key].values())) for key in of]
            cells.append(cell(rank_correlation(own, reached), signed=True))
        if any(cells):
            rows.append([setup.label, str(len(of)), *cells])
    head = ["setup", "estimators", *PREDICTORS]
    return f"\n## Does it predict the leaderboard?\n\n{PREDICTION}\n\n{markdown_table(head, rows)}" if rows else ""


def page(lines: Sequence[dict[str, Any]], accuracies: Mapping[Setup, Mapping[str, float]]) -> str:
    study = study_of(lines)
    if not study:
        return status(lines)
    figure = f"![Cosine to the trajectory's gradient against the cost of an update]({FIGURE.name})"
    found = [status(lines), f"## Conclusions\n\n{CONCLUSIONS}\n", claims(study), f"{figure}\n"]
    return "\n".join(found) + prediction(study, accuracies)


def parts() -> dict[Path, str]:
    """Page -> the part of it that is written."""
    lines, results = read_lines(DATA), read_results()
    study = study_of(lines)
    tables = [full(setup, study[setup]) for setup in all_models() if setup in study]
    searched = {setup: BOARD.choices(results, setup) for setup in SETUPS.values()}
    accuracies = {setup: {name: choice.accuracy for name, choice in of.items()} for setup, of in searched.items()}
    return {PAGE: page(lines, accuracies), README: "\n".join([status(lines), *tables])}


def figure(path: Path = FIGURE) -> None:
    """Plots the cosine to the trajectory against the cost, one panel per setup of the leaderboard."""
    study = study_of(read_lines(DATA))
    if not study:
        return
    drawing, axes = panels(2, 2, size=(WIDTH, 6), share_y=True)
    for setup, axis in zip(SETUPS.values(), axes, strict=True):
        for number, name in enumerate(PLOTTED):
            own = [lines for key, lines in study.get(setup, {}).items() if key[0] == name]
            means = [mean for lines in own if (mean := mean_over(lines, "cosine_to_trajectory"))]
            # A little apart, so that bars at the same cost do not cover each other.
            at = [1.02**number * statistics.fmean(line["cost"] for line in lines.values()) for lines in own]
            bars = [[mean.value - mean.low for mean in means], [mean.high - mean.value for mean in means]]
            style: Any = MARKED[number] | {"markersize": 4, "capsize": 2, "linewidth": 1.2, "label": name}
            axis.errorbar(at, [mean.value for mean in means], bars, **style)
        axis.set(title=f"{setup.task}, {NAMES[setup.start]}", xscale="log", ylim=(-0.1, 1.05))
        axis.set(xlabel="tokens of an update / of its rollout", ylabel="cosine to the trajectory")
        axis.set_xticks([0.1, 0.2, 0.5, 1, 2, 4], ["0.1", "0.2", "0.5", "1", "2", "4"])
        axis.minorticks_off()
    legend(drawing, columns=3)
    save_figure(drawing, path)


UNFINISHED = (
    "Tables have what is there; nothing is concluded from a part. Intervals of one seed leave out its variation."
)

CONCLUSIONS = """Differences of the cosine to the trajectory's gradient (in the last row: to the bound's) between two
estimators on the same completions, with 95% intervals over three seeds and 16 problems. Nothing is tested, because the
seeds are too few."""

PREDICTION = """Rank correlations of an estimator's measures with the percentage of validation problems that its methods
solve in the search of the [leaderboard](leaderboard.md), and their 95% intervals over estimators. Methods
with the same estimator count once, with their mean accuracy."""
