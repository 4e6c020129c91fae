"""PROTOCOL.md as code: what a run is, the data of the runs that are done, and which runs are missing.

`FULL` is the board itself. The other `PARTS` wait for its search, which decides what they compare.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, fields, replace
from itertools import product
from pathlib import Path
from statistics import fmean
from typing import Any, NamedTuple

from pocket.recipes import RECIPES, ROOT
from studies.json_lines import read_lines
from studies.leaderboard.variants import BOARD, REINFORCE, TRACERL, entry_of, flags_of, is_changed, values_of, way

DATA = ROOT / "studies" / "leaderboard" / "data"
START = "none"  # in place of a method: the model that runs start from
REFERENCE = "d1"  # the entry that tables give differences to
# Entries of the board that are the protocol's candidates of our own, and the variants as which they were searched.
CANDIDATES = {"quick-replay": f"rldf, {TRACERL}"}
LADDER = (1e-6, 3e-6, 1e-5, 3e-5, 1e-4, 3e-4, 1e-3, 3e-3, 1e-2)  # learning rates, by factors of about 3
# The settings of a method's entry that define its sampler, and the judge's values.
JUDGE = {"sampler": "exact", "remasking": "low_confidence", "block_length": 8}
OWN = (*JUDGE, "kv_cache", "reveal", "reveal_level", "diffusion_steps")


@dataclass(frozen=True)
class BoardTask:
    """An entry of `TASKS`.

    Attributes:
        recipe: its entry of `RECIPES`.
        dataset: the task's name in d1's `TASKS`.
        base: the folder of the base model.
        length: tokens per completion, in training and evaluation.
        flags: flags of RL in addition to pocket.yaml.
    """

    recipe: str
    dataset: str
    base: Path
    length: int
    flags: tuple[object, ...]


def board_task(task: str) -> BoardTask:
    """A task of `RECIPES` at the shorter of its lengths."""
    recipe = RECIPES[task]
    length = recipe.lengths[0]
    flags = ("--max_prompt_length", recipe.prompt_tokens, "--max_completion_length", length)
    return BoardTask(task, recipe.task, ROOT / "pocket" / recipe.base, length, flags)


TASKS = {name: board_task(name) for name in ("sudoku", "countdown", "arithmetic")}
ALL_TASKS = TASKS | {"large-sudoku": replace(TASKS["sudoku"], base=ROOT / "runs" / "large_base")}  # of the part "scale"


class Setup(NamedTuple):
    """A setup in which methods are compared: a task, and the model that runs start from, "sft" or "base"."""

    task: str
    start: str

    @property
    def label(self) -> str:
        return f"{self.task}-{self.start}"


SETUPS = {s.label: s for s in (Setup("sudoku", "sft"), Setup("sudoku", "base"))}
SETUPS |= {s.label: s for s in (Setup("countdown", "sft"), Setup("arithmetic", "sft"))}


@dataclass(frozen=True)
class Run:
    """One training with its evaluations; for the method `START`, the evaluation of a start model.

    Attributes:
        stage: "tuning", judged on validation problems, or "final", judged on sealed ones.
        budget: compute tokens.
    """

    stage: str
    task: str
    start: str
    method: str
    seed: int
    learning_rate: float = 0.0
    num_iterations: int = 0
    budget: int = 0

    @property
    def name(self) -> str:
        """For folders and messages. A variant's long name ends with a hash: file names have at most 255 bytes."""
        method = self.method
        if len(method) > 100:
            method = f"{method[:90]}-{hashlib.sha256(method.encode()).hexdigest()[:8]}"
        parts = [self.stage, self.task, self.start, method, f"seed{self.seed}"]
        if self.method != START:
            parts += [f"rate{self.learning_rate:g}", f"mu{self.num_iterations}", str(self.budget)]
        return "_".join(parts)

    @property
    def setup(self) -> Setup:
        return Setup(self.task, self.start)

    def settings(self) -> list[str]:
        """The flags of RL that define the run, without folders."""
        task, values = ALL_TASKS[self.task], values_of(self.method)
        flags: list[object] = [*flags_of(self.method), "--dataset", task.dataset, *task.flags]
        flags += ["--seed", self.seed, "--num_generations", 8, "--num_iterations", self.num_iterations]
        flags += ["--learning_rate", self.learning_rate, "--lr_scheduler_type", "linear", "--warmup_steps", 0]
        # Two tokens per step, except for methods that set the number of steps.
        if "diffusion_steps" not in values:
            flags += ["--diffusion_steps", task.length // 2]
        # Each step costs at least one token, so the budget ends the run, not max_steps.
        flags += ["--max_compute_tokens", self.budget, "--max_steps", self.budget, "--lr_scheduler_kwargs", "{}"]
        return [*map(str, flags), "--views_at_once", "64"]  # all views of any method at once: nothing is computed twice


Line = dict[str, Any]
Results = Mapping[Run, Mapping[str, Any]]


def file_of(data: Path, run: Run) -> Path:
    return data / f"{run.stage}.jsonl"


def read_results(data: Path = DATA, final_table: bool = False) -> dict[Run, Line]:
    """The line of each run, without its outcomes on sealed problems; the last line if a run has several.

    Lines of an entry or variant whose values in `BOARD` have changed since are left out. Only the final table
    reads the outcomes on sealed problems (`final_table`).
    """
    found = {}
    for file in sorted(data.glob("*.jsonl")):
        for line in read_lines(file):
            if not final_table:
                line.pop("sealed", None)
            if line["values"] == written_values(line["method"]):
                found[Run(**{field.name: line[field.name] for field in fields(Run)})] = line
    return found


def written_values(method: str) -> dict[str, Any] | None:
    """The values of an entry or variant, converted as in JSON; None for a start model or an entry that is gone."""
    return json.loads(json.dumps(values_of(method))) if entry_of(method) in BOARD else None


@dataclass(frozen=True)
class Protocol:
    """The numbers of PROTOCOL.md; `QUICK` and tests have smaller ones.

    Attributes:
        tuning_seeds: the first seed runs every cell of the grid; the others run the cells `near` the best.
        rates: learning rates of the grid, before it is extended within `lowest` and `highest`.
        far, near: differences of accuracy. The grid is not extended for a mu more than `far` below the best; a
            published method more than `far` below the best, or not among the `most` best of its setup, gets only `few`
            seeds of the smallest budget, unless it is the reference.
        limit: number of problems for tuning and for the final table; 0: all.
        curve: number of validation problems at each quarter of the last budget, for the first `few` seeds.
        sealed: final runs are judged on sealed problems, else on validation problems.
    """

    methods: tuple[str, ...] = (*BOARD,)
    setups: tuple[Setup, ...] = (*SETUPS.values(),)
    budgets: tuple[int, ...] = (1_500_000, 5_000_000)
    tuning_seeds: tuple[int, ...] = (100, 101)
    rates: tuple[float, ...] = (3e-5, 1e-4, 3e-4)
    lowest: float = LADDER[0]
    highest: float = LADDER[-1]
    seeds: int = 8
    few: int = 3
    far: float = 0.08
    near: float = 0.04
    most: int = 6
    limit: int = 0
    curve: int = 256
    sealed: bool = True

    def missing(self, results: Results) -> list[Run]:
        """The runs that can start now, the most urgent first; an empty list if the leaderboard is complete."""
        chosen: dict[tuple[Setup, str], Choice] = {}
        found: list[Run] = []
        for setup, method in product(self.setups, self.methods):
            runs, choice = self.tuning(results, setup, method)
            found += runs
            if choice:
                chosen[setup, method] = choice
        return [*found, *(run for run in self.final(chosen) if run not in results)]

    def tuning(self, results: Results, setup: Setup, method: str) -> tuple[list[Run], Choice | None]:
        """The runs that a method's search needs next in a setup; if there are none, the search's choice."""
        first, *others = self.tuning_seeds
        name = CANDIDATES.get(method, method)
        mus = updates_of(name)

        def run_of(rate: float, mu: int, seed: int) -> Run:
            return Run("tuning", *setup, name, seed, rate, mu, self.budgets[0])

        scores: dict[tuple[float, int], list[float]] = {}
        for rate, mu in product(LADDER, mus):
            lines = [results.get(run_of(rate, mu, seed)) for seed in self.tuning_seeds]
            if lines[0] or rate in self.rates:
                scores[rate, mu] = [accuracy(line["validation"]["exact"]) for line in lines if line]
        if untried := [run_of(*cell, first) for cell, found in scores.items() if not found]:
            return untried, None
        best = max(found[0] for found in scores.values())
        edges = []
        for mu in mus:
            own = {rate: found[0] for (rate, of), found in scores.items() if of == mu}
            top = min(own, key=lambda rate: (-own[rate], rate))
            if own[top] >= best - self.far:
                edges += [run_of(rate, mu, first) for rate in self.beyond(top, own)]
        if edges:
            return edges, None
        near = {cell: found for cell, found in scores.items() if found[0] >= best - self.near}
        again = [run_of(*cell, seed) for cell in near for seed in others if run_of(*cell, seed) not in results]
        if again:
            return again, None
        rate, mu = min(near, key=lambda cell: (-fmean(near[cell]), cell))
        if more := self.beyond(rate, [other for other, of in scores if of == mu]):
            return [run_of(other, mu, first) for other in more], None
        return [], Choice(rate, mu, fmean(near[rate, mu]))

    def choices(self, results: Results, setup: Setup) -> dict[str, Choice]:
        """Method -> the search's choice in a setup, for the methods whose search is complete."""
        found = {method: self.tuning(results, setup, method)[1] for method in self.methods}
        return {method: choice for method, choice in found.items() if choice}

    def beyond(self, rate: float, tried: Collection[float]) -> list[float]:
        """The learning rates next to `rate` that extend the grid, if `rate` is at an edge of the rates tried."""
        index = LADDER.index(rate)
        around = LADDER[max(0, index - 1) : index + 2]
        return [other for other in around if other not in tried and self.lowest <= other <= self.highest]

    def final(self, chosen: Mapping[tuple[Setup, str], Choice]) -> Iterator[Run]:
        """The final runs in the order of `turns`. All but the first `few` seeds of the smallest budget wait for the
        search of all methods of their setup, which decides `fewer_seeds`."""
        for budget, seed, setup in self.turns():
            smallest = budget == self.budgets[0]
            if smallest and (setup.start == "sft" or seed == 0):
                yield Run("final", *setup, START, seed)
            here = {method: choice for (of, method), choice in chosen.items() if of == setup}
            every_method = smallest and seed < self.few
            if not every_method and len(here) < len(self.methods):
                continue
            fewer = self.fewer_seeds(here)
            for method, choice in here.items():
                if every_method or method not in fewer:
                    yield Run("final", *setup, method, seed, choice.learning_rate, choice.num_iterations, budget)

    def turns(self) -> Iterator[tuple[int, int, Setup]]:
        """(budget, seed, setup): the first `few` seeds of the smallest budget, the larger budgets, the other seeds. So
        an incomplete leaderboard has the same seeds for all methods that it compares."""
        smallest, *larger = self.budgets
        seeds = range(self.seeds)
        yield from product([smallest], seeds[: self.few], self.setups)
        yield from product(larger, seeds, self.setups)
        yield from product([smallest], seeds[self.few :], self.setups)

    def fewer_seeds(self, here: Mapping[str, Choice]) -> dict[str, str]:
        """Method -> why it gets only the first `few` seeds and the smallest budget, given the search's choices in a
        setup."""
        published = [method for method in here if method not in CANDIDATES]
        ranked = sorted(published, key=lambda method: -here[method].accuracy)
        why = {}
        for rank, method in enumerate(ranked):
            if method != REFERENCE and here[method].accuracy < here[ranked[0]].accuracy - self.far:
                why[method] = "behind"
            elif method != REFERENCE and rank >= self.most:
                why[method] = "other"
        return why


class Choice(NamedTuple):
    """The choice of a search, and its mean accuracy over the tuning seeds."""

    learning_rate: float
    num_iterations: int
    accuracy: float


FULL = Protocol()
# A few minutes: two methods and a single learning rate, so there is no search.
QUICK = Protocol(
    methods=("d1", "tracerl"),
    setups=(SETUPS["sudoku-base"],),
    budgets=(500_000,),
    tuning_seeds=(100,),
    rates=(3e-4,),
    lowest=3e-4,
    highest=3e-4,
    seeds=1,
    limit=128,
    curve=64,
    sealed=False,
)


def accuracy(outcomes: str) -> float:
    """The share of ones in "0110..."."""
    return outcomes.count("1") / len(outcomes)


def best_rate(lines: Iterable[Mapping[str, Any]], rates: Sequence[float], seeds: int, name: str) -> float:
    """The rate of a search with the highest mean accuracy; of equal ones, the smallest.

    Raises:
        ValueError: a rate has fewer than `seeds` lines; the message has the `name` of what was searched.
    """
    lines = [*lines]
    found = {rate: [accuracy(line["right"]) for line in lines if line["rate"] == rate] for rate in rates}
    if any(len(of) < seeds for of in found.values()):
        raise ValueError(f"the search of {name} is not complete: run it first")
    return max(rates, key=lambda rate: (fmean(found[rate]), -rate))


def updates_of(method: str) -> tuple[int, ...]:
    """The values of num_iterations that are searched; an entry with other values is searched with one alone."""
    values = values_of(method)
    if values["num_iterations"] == 1 or is_changed(method):
        return (values["num_iterations"],)
    return (2, 4) if values["split_views"] else (1, 4)


def own_sampler(method: str, length: int) -> list[str] | None:
    """Flags of evaluation for the sampler of a method's own rollouts, at temperature 0; None if it is the judge's."""
    values = values_of(method)
    own = {name: values[name] for name in OWN if values.get(name, JUDGE.get(name)) != JUDGE.get(name)}
    if "diffusion_steps" in values:
        own["diffusion_steps"] = values["diffusion_steps"] or length
    return [part for name, value in own.items() for part in (f"--{name}", str(value))] or None


def sft_folder(folder: Path, task: str, seed: int) -> Path:
    return folder / f"{task}_sft{seed}"


def start_model(folder: Path, setup: Setup, seed: int) -> Path:
    return ALL_TASKS[setup.task].base if setup.start == "base" else sft_folder(folder, setup.task, seed) / "sft"


# --- The parts besides the board --------------------------------------------------------------------------------------

WIDTH = 200  # of the large model, which has 2.1 million parameters
# One change each to the best entry of the search, rldf, written as in the names of `variants.py`.
CHANGES = (
    "beta=0",
    "right_share=[0.2,0.8]",
    "num_iterations=4, split_views=true",
    "num_iterations=8, split_views=true",
    "num_views=2",
    "num_views=8",
    "temperature=0.8",
    "reveal_level=0.8",
    'sampler="cached+parallel", kv_cache="prefix"',
    TRACERL,
    REINFORCE,
)
# One change each to the best entry of the first two rounds, which is the one with `TRACERL`. The last one scores every
# merged step, as tracerl does: with the entry's own num_views, four of them are drawn.
LAST_CHANGES = ("temperature=0.8", "reveal_level=0.95", "segment_steps=4", "num_iterations=8", "num_views=null")
SEARCHED = ("sudoku-sft", "countdown-sft", "arithmetic-sft")  # setups of the search of a candidate


def ranking(results: Results, setups: Iterable[Setup] = FULL.setups, candidates: bool = True) -> list[str]:
    """The methods, best first: by the mean over `setups` of what the search's choice solves of the validation problems.

    Raises:
        ValueError: the search is not complete.
    """
    methods = [method for method in FULL.methods if candidates or method not in CANDIDATES]
    solved = solved_by(results, methods, tuple(setups))
    return sorted(solved, key=lambda method: -solved[method])


def searched(results: Results, method: str, setups: Iterable[Setup]) -> float:
    """The mean over setups of what the search's choice solves of the validation problems.

    Raises:
        ValueError: the search of the method is not complete.
    """
    found = []
    for setup in setups:
        runs, choice = FULL.tuning(results, setup, method)
        if choice is None:
            raise ValueError(f"the board's search is not complete: {method}, {setup.label} needs {len(runs)} more runs")
        found.append(choice.accuracy)
    return fmean(found)


def every_seed(methods: Iterable[str], setup: Setup, seeds: int = FULL.seeds) -> Protocol:
    """All methods with the same seeds, at the smaller budget."""
    return replace(FULL, methods=(*methods,), setups=(setup,), budgets=FULL.budgets[:1], seeds=seeds, most=99, far=1.0)


def best_way(results: Results) -> Protocol:
    """From d1 to the best other method: one idea at a time, and one after the other."""
    best = next(method for method in ranking(results) if method != REFERENCE)
    return every_seed((REFERENCE, *way(REFERENCE, best), best), SETUPS["sudoku-sft"])


def scale(results: Results) -> Protocol:
    """d1 and the five best others of the same task, on a model with ten times as many parameters."""
    best = [method for method in ranking(results, [SETUPS["sudoku-sft"]]) if method != REFERENCE]
    return every_seed((REFERENCE, *best[:5]), Setup("large-sudoku", "sft"), seeds=4)


def candidate_search(results: Results) -> Protocol:
    """The best entry with one change each, then with several, then the best of these with one more: the search alone,
    on validation problems."""
    best = ranking(results, candidates=False)[0]
    setups = tuple(SETUPS[label] for label in SEARCHED)
    names = [best, *(f"{best}, {change}" for change in CHANGES)]
    with suppress(ValueError):  # as long as a round is not complete
        names += combined(solved_by(results, names, setups))
        solved = solved_by(results, names, setups)
        names += [f"{max(names, key=solved.__getitem__)}, {change}" for change in LAST_CHANGES]
    return replace(FULL, methods=(*names,), setups=setups, seeds=0)


def solved_by(results: Results, names: Iterable[str], setups: tuple[Setup, ...]) -> dict[str, float]:
    """Name -> the mean over setups of what the search's choice solves; ValueError if a search is not complete."""
    return {name: searched(results, name, setups) for name in names}


def combined(solved: Mapping[str, float]) -> tuple[str, ...]:
    """The entry with all changes that are better than the entry itself, with the best three and with the best two.

    Of the changes of the same setting, only the best one counts.

    Args:
        solved: name -> the mean accuracy of the search; the entry itself comes first.
    """
    entry, *changed = solved
    kept: list[str] = []
    for name in sorted(changed, key=lambda one: -solved[one]):
        if solved[name] > solved[entry] and not any(settings_of(name) & settings_of(other) for other in kept):
            kept.append(name)
    changes = [name.removeprefix(f"{entry}, ") for name in kept]
    return tuple(dict.fromkeys(", ".join([entry, *changes[:most]]) for most in (99, 3, 2) if len(changes) > 1))


def settings_of(name: str) -> set[str]:
    """The settings that an entry with changes has otherwise."""
    return {change.partition("=")[0] for change in name.split(", ")[1:]}


def short(method: str) -> str:
    """A method's name in a table. A candidate has a star; the updates of another entry are named after that entry."""
    for changes, name in ((TRACERL, "tracerl's updates"), (REINFORCE, "reinforce's updates")):
        method = method.replace(changes, name)
    return method + "*" * (method in CANDIDATES)


PARTS: dict[str, Callable[[Results], Protocol]] = {
    "board": lambda results: FULL,
    "way": best_way,
    "scale": scale,
    "candidates": candidate_search,
}
