"""The recipes of the pocket base models: for each task its problems, texts, model size and two training stages."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from numpy.random import Generator

from pocket import arithmetic_traces, countdown_traces, programs_traces, sudoku_traces
from pocket.answers import completion, mixture

ROOT = Path(__file__).resolve().parents[1]
STAGES = ("careful answers", "mixed answers")


@dataclass(frozen=True)
class Recipe:
    """An entry of `RECIPES`.

    Attributes:
        task: name in d1's TASKS.
        base: folder in pocket/.
        training_file, sft_file: files in dataset/.
        traces: the module with the task's texts. A problem is a tuple of arguments. `problems(data_file)` returns a
            function that draws problems, `question(*problem)` the end of the user's message, `trace(style, *problem)` a
            trajectory and an attempt, and `quality(text, *problem)` the quality of an answer, at most 1.
        least_quality: minimum quality of the answers that are kept for SFT.
        peak_lr, steps: peak learning rate and number of steps per stage.
        completion_tokens: possible lengths of a batch's canvas; <eos> fills what an answer leaves empty.
        lengths: completion lengths in evaluation.
        prompt_tokens: length of every prompt.
        least_noise: t of the noise is uniform on [least_noise, 1].
    """

    task: str
    base: str
    training_file: str
    sft_file: str
    traces: Any
    least_quality: float
    peak_lr: tuple[float, float]
    steps: tuple[int, int]
    completion_tokens: tuple[int, ...]
    lengths: tuple[int, int]
    prompt_tokens: int
    hidden_size: int = 96
    least_noise: float = 0.0
    batch_size: int = 64

    def write(self, stage: int, problem: tuple[Any, ...], rng: Generator) -> str:
        """An answer for a stage: a right one in stage 0, else one of the mixture that imitates web text."""
        if stage == 0:
            return completion(*self.traces.trace("careful", *problem))
        return mixture(lambda style: self.traces.trace(style, *problem), rng, self.traces.HUMS)


RECIPES = {
    "sudoku": Recipe(
        task="sudoku",
        base="base",
        training_file="sudoku_train.csv",
        sft_file="sudoku_sft.jsonl",
        traces=sudoku_traces,
        least_quality=0.7,
        peak_lr=(3e-3, 1e-3),
        steps=(2000, 400),
        completion_tokens=(28, 32, 40),
        lengths=(32, 40),
        prompt_tokens=18,  # <bos>, 16 cells, =>
        hidden_size=64,
    ),
    "countdown": Recipe(
        task="pocket_countdown",
        base="countdown_base",
        training_file="pocket_countdown_train.jsonl",
        sft_file="pocket_countdown_sft.jsonl",
        traces=countdown_traces,
        least_quality=0.9,
        peak_lr=(2e-3, 1e-3),
        steps=(12000, 3000),
        completion_tokens=(24, 28, 32),
        lengths=(24, 32),
        prompt_tokens=6,
        least_noise=0.6,
    ),
    "arithmetic": Recipe(
        task="arithmetic",
        base="arithmetic_base",
        training_file="arithmetic_train.jsonl",
        sft_file="arithmetic_sft.jsonl",
        traces=arithmetic_traces,
        least_quality=0.6,
        peak_lr=(2e-3, 1e-3),
        steps=(9000, 700),
        completion_tokens=(32, 36, 40),
        lengths=(32, 40),
        prompt_tokens=24,
    ),
    "programs": Recipe(
        task="programs",
        base="programs_base",
        training_file="programs_train.jsonl",
        sft_file="programs_sft.jsonl",
        traces=programs_traces,
        least_quality=0.9,
        peak_lr=(3e-3, 1e-3),
        steps=(300, 200),
        completion_tokens=(20, 24, 32),
        lengths=(24, 32),
        prompt_tokens=12,
        hidden_size=64,
    ),
}
