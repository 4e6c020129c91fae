"""What the leaderboard runs: methods x tasks x starts x seeds at one compute, after a search of each method's rate.

Compute is `compute_tokens` of diffu-GRPO: tokens through the body, forward once and backward twice, rollouts included.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from itertools import product
from pathlib import Path

from d1.rl.methods import METHODS
from pocket.phases import Phase
from pocket.recipes import RECIPES, ROOT

# Tokens of a run, fixed before any, so that the board takes about five hours on two cores. On one of a Xeon's a run
# trains for 65 s on Sudoku, 110 s on Countdown and 105 s on word problems, whose models are wider; 14 to 23 s go around
# it: two evaluations of 512 problems, the KL, and saving. So the board, 90 runs on Sudoku and 45 on each of the others,
# takes 18,500 s of a core; the search, 72 runs of half the length on each of two tasks, 8,500 s; d1 with one choice
# changed, 18 runs on each of two tasks, 3,700 s. That is 4.3 hours on two cores.
BUDGET = 5_000_000
QUICK_BUDGET = 3_500_000  # of --quick: 15 runs of 51 s of a core are seven minutes on two
TOKENS_A_SECOND = 58_000  # for a job's progress, as is the next
SECONDS_AROUND = 16

# The search, the same for each method: its rate, and mu for methods that make several updates on a rollout.
RATES = (3e-5, 1e-4, 3e-4)
MUS = (1, 4)
UNTUNED_RATE = 1e-4  # where nothing is searched: --quick
MOST_UPDATES = 4  # there, as in pocket.yaml: papers that make 8 or 12 train models of eight billion weights
SEEDS = (0, 1, 2)
START = "none"  # the method of a start itself
COMPLETIONS = 64  # a rollout, in groups of eight

# What makes d1 and the others differ, one choice at a time: d1 at its own rate and mu with this choice of theirs.
CHANGED = "d1"
CHANGES: dict[str, tuple[object, ...]] = {
    "the prompt in sight": ("--p_mask_prompt", 0),
    "random masks": ("--estimator", "random_masks", "--objective", "clipped_views", "--p_mask_prompt", 0),
    "replay, eight steps a view": ("--estimator", "replay", "--segment_steps", 8, "--p_mask_prompt", 0),
    "advantages over their spread": ("--scale_rewards", "group"),
    "prompts partly solved": ("--right_share", 0.2, 0.8),
    "a rate of 1e-4": ("--learning_rate", 1e-4),
}
CHANGE_TASKS = ("sudoku", "arithmetic")  # on Countdown methods differ too little for a choice to show


@dataclass(frozen=True)
class BoardTask:
    """A row of `TASKS`.

    Attributes:
        dataset: its name in d1's `TASKS`.
        base: the model's folder in pocket/.
        length: tokens of a completion, in training and evaluation.
        starts: what runs begin from.
        flags: of diffu_grpo_train.py, beyond those of pocket.yaml.
    """

    dataset: str
    base: str
    length: int
    starts: tuple[str, ...]
    flags: tuple[object, ...]


def board_task(task: str, starts: tuple[str, ...] = ("sft",)) -> BoardTask:
    """A task of `RECIPES` at the shorter of its lengths."""
    recipe = RECIPES[task]
    length = recipe.lengths[0]
    flags = ("--max_prompt_length", recipe.prompt_tokens, "--max_completion_length", length)
    return BoardTask(recipe.task, recipe.base, length, starts, flags)


TASKS = {
    "sudoku": board_task("sudoku", starts=("sft", "base")),
    "countdown": board_task("countdown"),
    "arithmetic": board_task("arithmetic"),
}
TUNING_TASKS = (*TASKS,)[:2]


@dataclass(frozen=True)
class Run:
    """One training with its evaluations, or the evaluation of a start alone."""

    task: str
    start: str
    method: str
    seed: int
    split: str  # of the problems it is judged on
    learning_rate: float = 0.0
    num_iterations: int = 0
    budget: int = 0  # compute_tokens
    limit: int = 0  # problems; 0: all
    change: str = ""  # one of `CHANGES`

    @property
    def name(self) -> str:
        method = "_".join([self.method, *self.change.replace(",", "").split()])
        parts: list[object] = [self.split, self.task, self.start, method, f"seed{self.seed}"]
        if self.method != START:
            parts += [f"rate{self.learning_rate:g}", f"mu{self.num_iterations}", self.budget]
        return "_".join(map(str, [*parts, *([f"first{self.limit}"] if self.limit else [])]))

    def start_model(self, folder: Path) -> Path:
        base = ROOT / "pocket" / TASKS[self.task].base
        return base if self.start == "base" else sft_folder(folder, self.task, self.seed) / "sft"

    def settings(self, folder: Path, output_dir: Path) -> list[str]:
        """Flags of diffu_grpo_train.py. Logs are one a rollout."""
        task = TASKS[self.task]
        flags: list[object] = ["--config", ROOT / "diffu-grpo" / "pocket.yaml", "--method", self.method]
        flags += ["--dataset", task.dataset]
        flags += [*task.flags, "--model_path", self.start_model(folder), "--output_dir", output_dir]
        flags += ["--seed", self.seed, "--num_generations", 8, "--num_iterations", self.num_iterations]
        flags += ["--learning_rate", self.learning_rate, "--lr_scheduler_type", "constant"]
        # Two tokens a step, but for methods that bring their own way of sampling.
        if "diffusion_steps" not in METHODS[self.method].values:
            flags += ["--diffusion_steps", task.length // 2]
        # Each step takes a token at the least, so the budget ends the run and never max_steps.
        flags += ["--max_compute_tokens", self.budget, "--max_steps", self.budget]
        flags += CHANGES[self.change] if self.change else []
        flags += ["--resume_from_checkpoint", "true", "--eval_strategy", "no"]
        return [*map(str, flags), "--logging_steps", str(self.num_iterations), "--save_steps", "40"]

    def phase(self, folder: Path) -> Phase:
        values = {name: str(value) for name, value in asdict(self).items()}
        flags = [part for name, value in values.items() for part in (f"--{name}", value)]
        command = [sys.executable, "-m", "studies.leaderboard.one_run", "--output_dir", str(folder), *flags]
        needs = () if self.start == "base" else (sft_name(self.task, self.seed),)
        return Phase(self.name, command, ROOT, weight=SECONDS_AROUND + self.budget / TOKENS_A_SECOND, needs=needs)

    def evaluation(self, model: Path, output_dir: Path) -> list[str]:
        """Flags of eval.py for greedy completions of the problems the run is judged on."""
        task = TASKS[self.task]
        # Relative, so that the generation files name no machine's folders.
        flags: list[object] = ["--model_path", os.path.relpath(model), "--dataset", task.dataset]
        flags += ["--split", self.split, "--gen_length", task.length, "--block_length", 8, "--batch_size", 128]
        flags += ["--limit", self.limit] if self.limit else []
        return [*map(str, flags), "--output_dir", str(output_dir)]


def sft_folder(folder: Path, task: str, seed: int) -> Path:
    return folder / f"{task}_sft{seed}"


def sft_name(task: str, seed: int) -> str:
    return f"{task}_sft{seed}"


def updates_of(method: str) -> list[int]:
    """The values of mu that are searched: the paper's, where that is one update."""
    paper = METHODS[method].values["num_iterations"]
    return [1] if paper == 1 else [*MUS]


def tuning_runs(methods: Sequence[str], budget: int, limit: int = 0) -> list[Run]:
    """Half the budget on validation problems, from SFT, seed 0, for each rate and mu."""
    return [
        Run(task, "sft", method, 0, "validation", rate, mu, budget // 2, limit)
        for task in TUNING_TASKS
        for method in methods
        for rate, mu in product(RATES, updates_of(method))
    ]


def board_runs(
    methods: Sequence[str],
    settings: Mapping[str, tuple[float, int]],
    budget: int,
    seeds: Sequence[int] = SEEDS,
    starts: Sequence[str] = ("sft", "base"),
    tasks: Sequence[str] = (*TASKS,),
    limit: int = 0,
) -> list[Run]:
    """Every method whose (rate, mu) is known, seed by seed, so that a board cut short has all methods."""
    return [
        Run(task, start, method, seed, "test", *settings[method], budget, limit)
        for seed in seeds
        for task in tasks
        for start in TASKS[task].starts
        if start in starts
        for method in methods
        if method in settings
    ]


def change_runs(settings: Mapping[str, tuple[float, int]], budget: int, seeds: Sequence[int] = SEEDS) -> list[Run]:
    """d1 with one of `CHANGES`, from SFT, once d1's own (rate, mu) is known."""
    return [
        Run(task, "sft", CHANGED, seed, "test", *settings[CHANGED], budget, change=change)
        for seed in seeds
        for task in CHANGE_TASKS
        for change in CHANGES
        if CHANGED in settings
    ]


def start_runs(runs: Sequence[Run]) -> list[Run]:
    """The evaluations of what `runs` begin from; the base model is the same for all seeds."""
    starts = [(run.task, run.start, START, 0 if run.start == "base" else run.seed, run.split) for run in runs]
    limit = runs[0].limit if runs else 0
    return [Run(*start, limit=limit) for start in dict.fromkeys(starts)]


def untuned(methods: Sequence[str]) -> dict[str, tuple[float, int]]:
    """One rate for all, and the paper's mu, but for a cap."""
    return {name: (UNTUNED_RATE, min(METHODS[name].values["num_iterations"], MOST_UPDATES)) for name in methods}
