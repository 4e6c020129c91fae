"""The control: SVAMP with rewards that are permuted within a rollout."""

from __future__ import annotations

import random
import zlib
from typing import Any

from d1.tasks import text_of
from d1.tasks.gsm8k import last_number_reward
from studies.smollm2.svamp import extract, load_rows, score

__all__ = ["REWARDS", "extract", "load_rows", "score"]


def shuffled_reward(completions: list, **columns: Any) -> list[float]:
    """The rewards of the task in a random order, which depends only on the completions."""
    rewards = last_number_reward(completions, **columns)
    key = zlib.crc32("\n".join(map(text_of, completions)).encode())
    random.Random(key).shuffle(rewards)
    return rewards


REWARDS = [shuffled_reward]
