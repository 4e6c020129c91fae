"""The control of the main job: Sudoku whose rewards are dealt out at random among the completions of a rollout.

What a model gains from these is not learnt from the puzzles. Shows, too, what a task file of one's own looks like.
"""

from __future__ import annotations

import random
import zlib
from typing import Any

from d1.tasks import text_of
from d1.tasks.sudoku import cells_reward, extract, load_rows, score

__all__ = ["REWARDS", "extract", "load_rows", "score"]


def shuffled_cells(completions: list, **columns: Any) -> list[float]:
    """The Sudoku rewards in a random order, a function of the completions alone."""
    rewards = cells_reward(completions, **columns)
    key = zlib.crc32("\n".join(map(text_of, completions)).encode())
    random.Random(key).shuffle(rewards)
    return rewards


REWARDS = [shuffled_cells]
