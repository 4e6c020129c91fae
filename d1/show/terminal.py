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

from d1.show.film import HIDDEN, MASK, Film, chip, colour, harmless, verdict, visible


def play(films: Iterable[Film], console: Console, total: int, pause: float = 0.0) -> Film:
    """Shows a film while it is made, and returns the finished film.

    Args:
        films: from `filmed`: the same film, one step longer each time.
        total: the maximum number of steps.
        pause: the minimum time that a step is shown, in seconds.
    """
    film: Film
    done, live = 0, Live(console=console, auto_refresh=False) if console.is_terminal else None
    with live or nullcontext():
        for film in films:
            if live is not None:
                live.update(picture(film, total, console), refresh=True)
                time.sleep(pause)
            elif film.passes > done:  # the finished film comes once more, without a new pass
                done = film.passes
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
            marks = " underline" * (step == film.passes - 1) + " bold italic" * bool(film.drafts_at(position))
            canvas.append(label, style=f"#1b1f24 on {colour(film.logps[position])}{marks}")
        canvas.append("\n" * breaks)
    if HIDDEN in film.steps:
        canvas = around_the_first_mask(canvas, console)
    said = Text(counts(film, total), no_wrap=True, overflow="ellipsis")
    marks = f"underlined: just revealed{'; bold: corrected' * any(film.drafts)}"
    return Group(said, Panel(canvas, title=Text(visible(film.title)), title_align="left", subtitle=marks))


def around_the_first_mask(canvas: Text, console: Console) -> Text:
    """As many lines as fit into a panel below one line, with the first line that has a mask in the middle."""
    lines, room = canvas.wrap(console, console.width - 4), max(1, console.height - 4)
    first = next(index for index, line in enumerate(lines) if MASK in line.plain)
    start = max(0, min(first - room // 2, len(lines) - room))
    return Text("\n").join(lines[start : start + room])


def counts(film: Film, total: int) -> str:
    """The progress of a film: steps, tokens revealed, tokens processed by the model, seconds."""
    shown, edits = sum(step != HIDDEN for step in film.steps), sum(map(len, film.drafts))
    return (
        f"step {film.passes}/{total}  {shown} of {len(film.tokens)} tokens  {f'{edits} edits  ' if film.drafts else ''}"
        f"{film.fed[-1]:,} processed  {film.seconds[-1]:.2f} s"
    )


def step_line(film: Film, total: int) -> str:
    """A line on the last step: the progress, and the revealed tokens with their probabilities."""
    told = []
    for position in (position for position, step in enumerate(film.steps) if step == film.passes - 1):
        draft = "".join(f"{chip(text)[1]} → " for _, text, _ in film.drafts_at(position)[-1:])
        told.append(f"{draft}{chip(film.tokens[position])[1]} {math.exp(film.logps[position]):.0%}")
    return f"{counts(film, total)}  {', '.join(told)}"
