"""How the base model of each pocket task is made: its problems, its texts, its size and its two stages."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

from numpy.random import Generator

from d1.tasks.sudoku import solution_grids
from pocket import arithmetic_traces, countdown_traces, sudoku_traces

ROOT = Path(__file__).resolve().parents[1]
Writer = Callable[..., str]  # (*problem, rng) -> answer
Draw = Callable[[int, Generator], Sequence[Any]]  # (count, rng) -> problems, each a tuple


class Stage(NamedTuple):
    name: str  # what is read
    write: Writer
    peak_lr: float
    steps: int
    least_noise: float = 0.0  # t of the noise is uniform from here to 1


@dataclass(frozen=True)
class Recipe:
    """A row of `RECIPES`."""

    task: str  # in d1's TASKS
    base: str  # folder in pocket/
    training_file: str  # in dataset/
    problems: Callable[[Path], Draw]
    question: Callable[..., str]  # *problem -> what ends the user's message
    quality: Callable[..., float]  # (text, *problem) -> how right an answer is, up to 1
    sft_file: str  # in dataset/
    least_quality: float  # of the answers that are kept for SFT
    stages: tuple[Stage, ...]
    completion_tokens: tuple[int, ...]  # a batch's canvas; what an answer does not fill is <eos>
    lengths: tuple[int, int]  # of evaluation
    prompt_tokens: int  # of every prompt
    hidden_size: int = 64
    batch_size: int = 64


def sudoku_problems(data_file: Path) -> Draw:
    solutions = sudoku_traces.training_grids(data_file)
    all_grids = sudoku_traces.as_digits(solution_grids())

    def draw(count: int, rng: Generator) -> Sequence[Any]:
        return list(zip(*sudoku_traces.draw_puzzles(solutions, count, all_grids, rng), strict=True))

    return draw


def countdown_problems(data_file: Path) -> Draw:
    problems = countdown_traces.training_problems(data_file)
    return lambda count, rng: countdown_traces.draw_problems(problems, count, rng)


def arithmetic_problems(data_file: Path) -> Draw:
    numbers = arithmetic_traces.training_numbers(data_file)
    return lambda count, rng: arithmetic_traces.draw_problems(numbers, count, rng)


RECIPES = {
    "sudoku": Recipe(
        task="sudoku",
        base="base",
        training_file="sudoku_train.csv",
        problems=sudoku_problems,
        question=sudoku_traces.question,
        quality=sudoku_traces.cells_right,
        sft_file="sudoku_sft.jsonl",
        least_quality=0.7,
        stages=(
            Stage("careful answers", sudoku_traces.careful_completion, 3e-3, 2000),
            Stage("mixed answers", sudoku_traces.mixed_completion, 1e-3, 400),
        ),
        completion_tokens=(28, 32, 40),
        lengths=(32, 40),
        prompt_tokens=18,
    ),
    "countdown": Recipe(
        task="pocket_countdown",
        base="countdown_base",
        training_file="pocket_countdown_train.jsonl",
        problems=countdown_problems,
        question=countdown_traces.question,
        quality=countdown_traces.closeness,
        sft_file="pocket_countdown_sft.jsonl",
        least_quality=0.9,
        stages=(
            Stage("careful answers", countdown_traces.careful_completion, 2e-3, 12000, least_noise=0.6),
            Stage("mixed answers", countdown_traces.mixed_completion, 1e-3, 3000, least_noise=0.6),
        ),
        completion_tokens=(24, 28, 32),
        lengths=(24, 32),
        prompt_tokens=6,
        hidden_size=96,
    ),
    "arithmetic": Recipe(
        task="arithmetic",
        base="arithmetic_base",
        training_file="arithmetic_train.jsonl",
        problems=arithmetic_problems,
        question=arithmetic_traces.question,
        quality=arithmetic_traces.steps_right,
        sft_file="arithmetic_sft.jsonl",
        least_quality=0.6,
        stages=(
            Stage("careful answers", arithmetic_traces.careful_completion, 2e-3, 9000),
            Stage("mixed answers", arithmetic_traces.mixed_completion, 1e-3, 700),
        ),
        completion_tokens=(32, 36, 40),
        lengths=(32, 40),
        prompt_tokens=24,
        hidden_size=96,
    ),
}
