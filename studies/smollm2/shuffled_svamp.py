"""The control: SVAMP with rewards that are permuted within a rollout."""

from __future__ import annotations

from typing import Any

from d1.tasks.gsm8k import last_number_reward
from pocket.shuffled_sudoku import shuffle_rewards
from studies.smollm2.study_svamp import extract, load_rows, score

__all__ = ["REWARDS", "extract", "load_rows", "score"]


def shuffled_reward(completions: list, **columns: Any) -> list[float]:
    """The rewards of the task in a random order."""
    return shuffle_rewards(last_number_reward(completions, **columns), completions)


REWARDS = [shuffled_reward]
