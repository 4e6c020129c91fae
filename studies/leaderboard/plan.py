"""The plan of the leaderboard, as PROTOCOL.md describes it: the missing runs, given the existing results."""

from __future__ import annotations

import hashlib
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass, replace
from itertools import product
from pathlib import Path
from statistics import fmean
from typing import Any, NamedTuple

from d1.rl.methods import METHODS
from pocket.recipes import RECIPES, ROOT
from studies.leaderboard.variants import TRACERL, flags_of, is_changed, values_of

START = "none"  # in place of a method: the model that runs start from
REFERENCE = "d1"  # the row that tables give differences to
# Rows of METHODS that are the protocol's candidates of our own, and the variants as which they were searched.
CANDIDATES = {"quick-replay": f"rldf, {TRACERL}"}
LADDER = (1e-6, 3e-6, 1e-5, 3e-5, 1e-4, 3e-4, 1e-3, 3e-3, 1e-2)  # learning rates, by factors of about 3
# The settings of a method's row that define its sampler, and the judge's values.
JUDGE = {"sampler": "exact", "remasking": "low_confidence", "block_length": 8}
OWN = (*JUDGE, "kv_cache", "reveal", "reveal_level", "diffusion_steps")


@dataclass(frozen=True)
class BoardTask:
    """A row of `TASKS`.

    Attributes:
        recipe: its row of `RECIPES`.
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

    methods: tuple[str, ...] = (*METHODS,)
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

    def missing(self, results: Mapping[Run, Mapping[str, Any]]) -> list[Run]:
        """The runs that can start now, the most urgent first; an empty list if the leaderboard is complete."""
        chosen: dict[tuple[Setup, str], Choice] = {}
        found: list[Run] = []
        for setup, method in product(self.setups, self.methods):
            runs, choice = self.tuning(results, setup, method)
            found += runs
            if choice:
                chosen[setup, method] = choice
        return [*found, *(run for run in self.final(chosen) if run not in results)]

    def tuning(
        self, results: Mapping[Run, Mapping[str, Any]], setup: Setup, method: str
    ) -> tuple[list[Run], Choice | None]:
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

    def choices(self, results: Mapping[Run, Mapping[str, Any]], setup: Setup) -> dict[str, Choice]:
        """Method -> the search's choice in a setup, for the methods whose search is complete."""
        found = {method: self.tuning(results, setup, method)[1] for method in self.methods}
        return {method: choice for method, choice in found.items() if choice}

    def beyond(self, rate: float, tried: Collection[float]) -> list[float]:
        """The learning rates next to `rate` that extend the grid, if `rate` is at an edge of the rates tried."""
        place = LADDER.index(rate)
        around = LADDER[max(0, place - 1) : place + 2]
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
        for place, method in enumerate(ranked):
            if method != REFERENCE and here[method].accuracy < here[ranked[0]].accuracy - self.far:
                why[method] = "behind"
            elif method != REFERENCE and place >= self.most:
                why[method] = f"not of the best {self.most}"
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


def updates_of(method: str) -> tuple[int, ...]:
    """The values of num_iterations that are searched; a row with other values is searched with one alone."""
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
