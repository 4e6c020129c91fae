"""Films as pictures of running text, for documents: an animated SVG, and a GIF for where no SVG moves.

Several films stand below each other, each under its title, and go through their steps together.
"""

from __future__ import annotations

import io
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from rich.cells import cell_len, set_cell_size

from d1.show.film import COLOURS, FILLED, Film, chip, colour, visible
from d1.show.svg import PAD, SECONDS_AT_THE_END, captions, card, document, step_seconds, written

COLUMNS = 72  # of a line, in characters
WIDE, HIGH, SIZE = 9.0, 26, 14  # pixels: a character, a line, and the height of the type
TITLE, FOOT = 30, 24  # pixels: above each film, and below all
PAPER, INK, SOFT, MASK = "#ffffff", "#1b1f24", "#57606a", "#e4e8ec"  # of the GIF, which has light colours alone


class Box(NamedTuple):
    """Where a token is written: line and column it begins at, characters it is wide, and what is written."""

    line: int
    column: int
    width: int
    label: str


def flow(tokens: Sequence[str], columns: int = COLUMNS) -> list[Box]:
    """Tokens as running text in lines of so many characters; one that is longer than a line is cut."""
    boxes, line, column = [], 0, 0
    for token in tokens:
        gap, label, breaks = chip(token)
        if cell_len(label) > columns:
            label = set_cell_size(label, columns - 1) + "…"
        width = max(cell_len(label), 1)
        column += gap if column else 0
        if column + width > columns:
            line, column = line + 1, 0
        boxes.append(Box(line, column, width, label))
        line, column = (line + breaks, 0) if breaks else (line, column + width)
    return boxes


class Laid(NamedTuple):
    """A film in its place: pixels of its top, and its tokens' boxes."""

    film: Film
    top: float
    boxes: list[Box]

    def places(self) -> Iterator[tuple[float, float, float, Box, int]]:
        """Of each token: left, top and width in pixels, its box, and the place of the canvas."""
        for place, box in enumerate(self.boxes):
            y = self.top + TITLE + box.line * HIGH
            yield PAD + box.column * WIDE, y, box.width * WIDE - 1.5, box, place


def lay_out(films: Sequence[Film]) -> tuple[list[Laid], float, float, int]:
    """The films in their places, the picture's width and height in pixels, and its steps."""
    laid, top = [], float(PAD)
    for film in films:
        boxes = flow(film.tokens)
        laid.append(Laid(film, top, boxes))
        top += TITLE + (boxes[-1].line + 1) * HIGH + PAD
    return laid, 2 * PAD + COLUMNS * WIDE, top + FOOT, max(film.passes for film in films)


def film_svg(films: Sequence[Film]) -> str:
    """An animated SVG; tokens come over the grey chips that hide them, in the colour of their confidence."""
    laid, width, height, steps = lay_out(films)
    parts = [card(width, height)]
    for one in laid:
        title = visible(one.film.title)
        parts.append(written(title, PAD + cell_len(title) * SIZE * 0.3, one.top + 10, SIZE, "given"))
        shown_by = one.film.shown_by()
        for x, y, wide, box, place in one.places():
            shape = f'x="{x:g}" y="{y:g}" width="{wide:g}" height="{HIGH - 4}" rx="4"'
            looked = one.film.steps[place] != FILLED
            fill = f'fill="{colour(one.film.logps[place])}"' if looked else 'class="card"'
            text = written(box.label, x + wide / 2, y + HIGH / 2 - 2, SIZE, "" if looked else "page")
            parts.append(f'<rect class="mask" {shape}/>')
            parts.append(f'<g class="s{shown_by[place]}"><rect {shape} {fill}/>{text}</g>')
    parts += captions(steps, width, height, PAD + 60)
    return document(width, height, parts, steps, "A text being denoised")


def shades() -> list[int]:
    """The GIF's palette, as red, green, blue, red, ...: every colour on its way to the ink and to the paper."""
    fills, ways = (*COLOURS, MASK, PAPER), (INK, SOFT, PAPER)
    pairs = [(bytes.fromhex(fill[1:]), bytes.fromhex(end[1:])) for fill in fills for end in ways]
    return [
        round(a + (b - a) * way / 8) for fill, end in pairs for way in range(9) for a, b in zip(fill, end, strict=True)
    ]


def film_gif(films: Sequence[Film]) -> bytes:
    """The same as a GIF. Its letters are those of a font without Chinese or emoji, which it shows as boxes."""
    import matplotlib
    from PIL import Image, ImageDraw, ImageFont

    laid, width, height, steps = lay_out(films)
    font = ImageFont.truetype(Path(matplotlib.get_data_path()) / "fonts" / "ttf" / "DejaVuSansMono.ttf", SIZE)
    image = Image.new("RGB", (round(width), round(height)), PAPER)
    draw = ImageDraw.Draw(image)
    low = height - PAD
    for one in laid:
        draw.text((PAD, one.top + 10), visible(one.film.title).replace("\n", " "), INK, font, anchor="lm")
        for x, y, wide, _, _ in one.places():
            draw.rounded_rectangle((x, y, x + wide, y + HIGH - 4), 4, MASK)
    for index, fill in enumerate(COLOURS):
        right = width - PAD - 26 * (len(COLOURS) - 1 - index)
        draw.rounded_rectangle((right - 24, low - 7, right, low + 7), 3, fill)

    def reveal(step: int) -> Any:
        """The picture after so many steps, drawn over the one before."""
        draw.rectangle((PAD, low - 8, width / 2, low + 8), PAPER)
        draw.text((PAD, low), f"step {step} of {steps}", SOFT, font, anchor="lm")
        for one in laid:
            shown_by, film = one.film.shown_by(), one.film
            for x, y, wide, box, place in one.places():
                if shown_by[place] == step:
                    looked = film.steps[place] != FILLED
                    fill = colour(film.logps[place]) if looked else PAPER
                    draw.rounded_rectangle((x, y, x + wide, y + HIGH - 4), 4, fill)
                    draw.text((x + wide / 2, y + HIGH / 2 - 2), box.label, INK if looked else SOFT, font, anchor="mm")
        return image.copy()

    frames = [reveal(step) for step in range(steps + 1)]
    palette = Image.new("P", (1, 1))
    palette.putpalette(shades())
    drawn = [one.quantize(palette=palette, dither=Image.Dither.NONE) for one in frames]
    durations = [round(1000 * step_seconds(steps))] * steps + [round(1000 * SECONDS_AT_THE_END)]
    file = io.BytesIO()
    drawn[0].save(file, "GIF", save_all=True, append_images=drawn[1:], duration=durations, loop=0)
    return file.getvalue()
