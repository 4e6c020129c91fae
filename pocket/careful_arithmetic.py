"""Word problems whose solutions are in the pocket model's words, for methods that give parts of them as hints."""

from __future__ import annotations

from typing import Any

from d1.tasks.arithmetic import REWARDS, extract, load_rows, score

__all__ = ["REWARDS", "demonstrate", "extract", "load_rows", "score"]


def demonstrate(row: dict[str, Any]) -> str:
    """The solution of the base model's solver `careful`."""
    steps = row["solution"].replace("\n", " ; ")
    return f"<reasoning> careful {steps} </reasoning> <answer> {row['ground_truth']:.0f} </answer>"
