"""The form of every pocket answer, and the mixture of solvers that stands for text of the web.

A trace is a style word and what follows from it; an attempt is the answer alone. `careful` is right. `scan` and `quick`
are wrong in the same way each time: with random slips the most likely token would stay the right one, and later
training would have nothing to teach.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from numpy.random import Generator

Draw = Callable[[int, Generator], Sequence[Any]]  # (count, rng) -> problems, each a tuple
STYLES = ("careful", "scan", "quick")
MALFORMED = ("truncated", "tagless", "rambling")


def completion(trajectory: str, attempt: str) -> str:
    """The text of an answer, the same as the target of SFT."""
    return f"<reasoning>{trajectory}</reasoning>\n<answer>{attempt}</answer>"


def malform(trajectory: str, attempt: str, kind: str, rng: Generator, hums: int) -> str:
    """An answer that breaks off, one without tags, or one that rambles (`hums` words) and never comes to the point."""
    if kind == "truncated":
        words = attempt.split()
        whole = completion(trajectory, " ".join(words[: rng.integers(len(words))]))
        return whole.removesuffix("</answer>")
    if kind == "tagless":
        return f"{trajectory} {attempt}"
    style, *deductions = trajectory.split()
    return f"<reasoning>{style} {' '.join(f'{word} hmm' for word in rng.choice(deductions, size=hums))}"


def mixture(trace: Callable[[str], tuple[str, str]], rng: Generator, hums: int) -> str:
    """One answer, of the (trajectory, attempt) that `trace` gives for a style: half quick (a third of it malformed),
    some scan, few careful."""
    style = rng.choice(STYLES, p=(0.2, 0.3, 0.5))
    trajectory, attempt = trace(style)
    if style == "quick" and rng.random() < 1 / 3:
        return malform(trajectory, attempt, rng.choice(MALFORMED), rng, hums)
    return completion(trajectory, attempt)
