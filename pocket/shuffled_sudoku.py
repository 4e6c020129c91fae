"""The control of the main demo: Sudoku with rewards that are shuffled among the completions of a rollout.

What a model gains from these rewards is not learnt from the puzzles. This is also an example of a user's task file.
"""

from __future__ import annotations

import random
import zlib
from typing import Any

from d1.tasks import text_of
from d1.tasks.sudoku import cells_reward, extract, load_rows, score

__all__ = ["REWARDS", "extract", "load_rows", "score"]


def shuffle_rewards(rewards: list[float], completions: list) -> list[float]:
    """The rewards in a random order, which depends only on the completions."""
    key = zlib.crc32("\n".join(map(text_of, completions)).encode())
    shuffled = list(rewards)
    random.Random(key).shuffle(shuffled)
    return shuffled


def shuffled_cells(completions: list, **columns: Any) -> list[float]:
    """The Sudoku rewards in a random order."""
    return shuffle_rewards(cells_reward(completions, **columns), completions)


REWARDS = [shuffled_cells]
