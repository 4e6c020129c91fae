"""Play a film in a terminal: the canvas is updated in place; if the output is not a terminal, one line per step."""

from __future__ import annotations

import math
import time
from collections.abc import Iterable
from contextlib import nullcontext

from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.panel import Panel
from rich.text import Text

from d1.files import harmless
from d1.show.film import HIDDEN, MASK, Film, chip, colour, verdict, visible


def play(films: Iterable[Film], console: Console, total: int, pause: float = 0.0) -> Film:
    """Shows a film while it is made, and returns the finished film.

    Args:
        films: from `filmed`: the same film, one step longer each time.
        total: the maximum number of steps.
        pause: the minimum time that a step is shown, in seconds.
    """
    film: Film
    passes = 0  # of the last line
    live = Live(console=console, auto_refresh=False) if console.is_terminal else None
    with live or nullcontext():
        for film in films:
            if live is not None:
                live.update(picture(film, total, console), refresh=True)
                time.sleep(pause)
            elif film.passes > passes:  # the finished film comes once more, without a new pass
                passes = film.passes
                console.out(step_line(film, total), highlight=False)
    if live is None:
        console.out(harmless(film.text), highlight=False)
    if film.solved is not None:
        console.out(verdict(film), highlight=False)
    return film


def picture(film: Film, total: int, console: Console) -> RenderableType:
    """The canvas with its masks; tokens have the colour of their confidence, those of the last step are underlined and
    corrected ones bold. If it has more lines than the terminal, the lines around the first mask are shown until it is
    complete."""
    canvas = Text(overflow="fold")
    for position, (token, step) in enumerate(zip(film.tokens, film.steps, strict=True)):
        gap, label, breaks = chip(token)
        canvas.append(" " * gap if position else "")
        if step == HIDDEN:
            canvas.append(f" {MASK}" if position else MASK, style="dim")
        elif step < 0:
            canvas.append(label, style="dim")
        else:
            style = f"#1b1f24 on {colour(film.logps[position])}"
            if step == film.passes - 1:
                style += " underline"
            if film.drafts_at(position):
                style += " bold italic"
            canvas.append(label, style=style)
        canvas.append("\n" * breaks)
    if HIDDEN in film.steps:
        canvas = lines_around_first_mask(canvas, console)
    progress = Text(counts(film, total), no_wrap=True, overflow="ellipsis")
    legend = "underlined: just revealed"
    if any(film.drafts):
        legend += "; bold: corrected"
    return Group(progress, Panel(canvas, title=Text(visible(film.title)), title_align="left", subtitle=legend))


def lines_around_first_mask(canvas: Text, console: Console) -> Text:
    """As many lines as fit into a panel below one line, with the first line that has a mask in the middle."""
    lines = canvas.wrap(console, console.width - 4)
    max_lines = max(1, console.height - 4)
    mask_line = next(index for index, line in enumerate(lines) if MASK in line.plain)
    start = max(0, min(mask_line - max_lines // 2, len(lines) - max_lines))
    return Text("\n").join(lines[start : start + max_lines])


def counts(film: Film, total: int) -> str:
    """The progress of a film: steps, tokens revealed, tokens processed by the model, seconds."""
    revealed = sum(step != HIDDEN for step in film.steps)
    parts = [f"step {film.passes}/{total}", f"{revealed} of {len(film.tokens)} tokens"]
    if film.drafts:
        parts.append(f"{sum(map(len, film.drafts))} edits")
    parts += [f"{film.fed[-1]:,} processed", f"{film.seconds[-1]:.2f} s"]
    return "  ".join(parts)


def step_line(film: Film, total: int) -> str:
    """A line on the last step: the progress, and the revealed tokens with their probabilities."""
    revealed = []
    for position, step in enumerate(film.steps):
        if step == film.passes - 1:
            # The token, after the one that it replaces.
            replaced = "".join(f"{chip(text)[1]} → " for _, text, *_ in film.drafts_at(position)[-1:])
            label = chip(film.tokens[position])[1]
            revealed.append(f"{replaced}{label} {math.exp(film.logps[position]):.0%}")
    return f"{counts(film, total)}  {', '.join(revealed)}"
