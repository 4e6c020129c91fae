"""The format of all pocket answers, and the mixture of solvers that imitates text of the web.

A trajectory is a style word and the steps of a solver in that style; an attempt is the answer alone. `careful` is
right. `scan` and `quick` make systematic errors: with random errors, the most likely token would still be the right
one, and later training would have nothing to teach.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from numpy.random import Generator

Draw = Callable[[int, Generator], Sequence[Any]]  # (count, rng) -> problems, each a tuple
STYLES = ("careful", "scan", "quick")
MALFORMED = ("truncated", "tagless", "rambling")


def completion(trajectory: str, attempt: str) -> str:
    """The text of an answer, in the format of the SFT targets."""
    return f"<reasoning>{trajectory}</reasoning>\n<answer>{attempt}</answer>"


def malform(trajectory: str, attempt: str, kind: str, rng: Generator, hums: int) -> str:
    """A malformed answer: cut off, without tags, or rambling (`hums` words) without an attempt."""
    if kind == "truncated":
        words = attempt.split()
        whole = completion(trajectory, " ".join(words[: rng.integers(len(words))]))
        return whole.removesuffix("</answer>")
    if kind == "tagless":
        return f"{trajectory} {attempt}"
    style, *deductions = trajectory.split()
    return f"<reasoning>{style} {' '.join(f'{word} hmm' for word in rng.choice(deductions, size=hums))}"


def mixture(trace: Callable[[str], tuple[str, str]], rng: Generator, hums: int) -> str:
    """One answer in a random style: 50% quick (a third of them malformed), 30% scan, 20% careful. `trace` gives the
    (trajectory, attempt) of a style."""
    style = rng.choice(STYLES, p=(0.2, 0.3, 0.5))
    trajectory, attempt = trace(style)
    if style == "quick" and rng.random() < 1 / 3:
        return malform(trajectory, attempt, rng.choice(MALFORMED), rng, hums)
    return completion(trajectory, attempt)
