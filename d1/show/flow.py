"""Films as pictures of running text, for documents: an animated SVG, and a GIF for where no SVG moves.

Several films stand below each other, each under its title, and go through their steps together.
"""

from __future__ import annotations

import io
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple
from xml.sax.saxutils import escape

from rich.cells import cell_len, set_cell_size

from d1.show.film import COLOURS, FILLED, Film, chip, colour, visible

COLUMNS = 72  # of a line, in characters
WIDE, HIGH, SIZE = 9.0, 26, 14  # pixels: a character, a line, and the height of the type
TITLE, FOOT, PAD = 30, 24, 16  # pixels: above each film, below all, and around everything
PAPER, INK, SOFT, MASK = "#ffffff", "#1b1f24", "#57606a", "#e4e8ec"  # of the GIF, which has light colours alone

SECONDS_A_STEP, SECONDS_OF_STEPS, SECONDS_AT_THE_END = 0.45, 16.0, 3.0
STYLE = """\
text{font-family:ui-monospace,Menlo,Consolas,monospace;text-anchor:middle;dominant-baseline:central;fill:#1b1f24}
.card{fill:#ffffff;stroke:#d0d7de}.cell{fill:none;stroke:#8c959f}.box{fill:none;stroke:#57606a;stroke-width:2}
.mask{fill:#e4e8ec}.page,.page text{fill:#57606a}.given{fill:#24292f;font-weight:bold}
@media(prefers-color-scheme:dark){.card{fill:#161b22;stroke:#30363d}.cell{stroke:#57606a}.box{stroke:#8b949e}
.mask{fill:#2b323b}.page,.page text{fill:#9da7b1}.given{fill:#f0f6fc}}
@media(prefers-reduced-motion:reduce){*{animation:none!important}}
"""


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


class Placed(NamedTuple):
    """A token in the picture."""

    left: float  # pixels, as top and width
    top: float
    width: float
    label: str
    step: int  # with which it appears, from 1
    fill: str | None  # the colour of its probability; None where no pass looked at it


Laid = tuple[str, float, list[Placed]]  # a film's title, its top in pixels, and its tokens


def lay_out(films: Sequence[Film]) -> tuple[list[Laid], float, float, int]:
    """The films below each other, the picture's width and height in pixels, and its steps."""
    laid: list[Laid] = []
    top = float(PAD)
    for film in films:
        boxes, placed = flow(film.tokens), []
        for box, step, logp, shown in zip(boxes, film.steps, film.logps, film.shown_by(), strict=True):
            left, below = PAD + box.column * WIDE, top + TITLE + box.line * HIGH
            fill = None if step == FILLED else colour(logp)
            placed.append(Placed(left, below, box.width * WIDE - 1.5, box.label, shown, fill))
        laid.append((visible(film.title), top, placed))
        top += TITLE + (boxes[-1].line + 1) * HIGH + PAD
    return laid, 2 * PAD + COLUMNS * WIDE, top + FOOT, max(film.passes for film in films)


def step_seconds(steps: int) -> float:
    """How long each of so many steps stays."""
    return min(SECONDS_A_STEP, SECONDS_OF_STEPS / steps)


def written(text: str, x: float, y: float, size: float, kind: str = "") -> str:
    """Text around a point; `size` in pixels."""
    name = f' class="{kind}"' if kind else ""
    return f'<text{name} x="{x:g}" y="{y:g}" font-size="{size:.3g}">{escape(text)}</text>'


def captions(steps: int, width: float, height: float, left: float) -> list[str]:
    """Along the bottom: the step's number, around column `left`, and what the colours mean."""
    y = height - PAD
    found = []
    for step in range(1, steps + 1):
        hidden = "" if step == steps else ' opacity="0"'  # unless animated, the last one alone is seen
        counted = written(f"step {step} of {steps}", left, y, 14)
        found.append(f'<g class="page c{step}"{hidden}>{counted}</g>')
    start = width - PAD - 5 * 26 - 40
    found += [
        f'<rect x="{start + 26 * index:g}" y="{y - 7:g}" width="24" height="14" rx="3" fill="{fill}"/>'
        for index, fill in enumerate(COLOURS)
    ]
    ends = written("unsure", start - 34, y, 14) + written("sure", start + 5 * 26 + 20, y, 14)
    return [*found, f'<g class="page">{ends}</g>']


def document(width: float, height: float, parts: Sequence[str], steps: int, title: str) -> str:
    """The whole picture: what is in a group of class `s1`, `s2`, ... appears with that step, and what is in `c1`, ...
    is there in that step alone; all of it again and again."""
    a_step = step_seconds(steps)
    seconds = (steps + 1) * a_step + SECONDS_AT_THE_END
    rules = []
    for step in range(1, steps + 1):
        start = 100 * step * a_step / seconds
        until = 100.0 if step == steps else 100 * (step + 1) * a_step / seconds
        rules.append(f"@keyframes s{step}{{0%,{start:.2f}%{{opacity:0}}{start + 1.5:.2f}%,100%{{opacity:1}}}}")
        rules.append(f"@keyframes c{step}{{0%,{start:.2f}%{{opacity:0}}{start + 0.01:.2f}%,{until:.2f}%{{opacity:1}}")
        rules.append("}" if step == steps else f"{until + 0.01:.2f}%,100%{{opacity:0}}}}")
        rules.append(
            f".s{step}{{animation:s{step} {seconds:g}s infinite}}.c{step}{{animation:c{step} {seconds:g}s infinite}}\n"
        )
    size = f'viewBox="0 0 {width:g} {height:g}" width="{width:g}" height="{height:g}"'
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" {size}>\n'
        f"<title>{escape(title)}</title>\n<style>\n{STYLE}{''.join(rules)}</style>\n" + "\n".join(parts) + "\n</svg>\n"
    )


def film_svg(films: Sequence[Film]) -> str:
    """An animated SVG; tokens come over the grey chips that hide them, in the colour of their confidence."""
    laid, width, height, steps = lay_out(films)
    parts = [f'<rect class="card" x=".5" y=".5" width="{width - 1:g}" height="{height - 1:g}" rx="10"/>']
    for title, top, tokens in laid:
        parts.append(written(title, PAD + cell_len(title) * SIZE * 0.3, top + 10, SIZE, "given"))
        for x, y, wide, label, step, fill in tokens:
            shape = f'x="{x:g}" y="{y:g}" width="{wide:g}" height="{HIGH - 4}" rx="4"'
            paint = f'fill="{fill}"' if fill else 'class="card"'
            text = written(label, x + wide / 2, y + HIGH / 2 - 2, SIZE, "" if fill else "page")
            parts.append(f'<rect class="mask" {shape}/>')
            parts.append(f'<g class="s{step}"><rect {shape} {paint}/>{text}</g>')
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
    for title, top, tokens in laid:
        draw.text((PAD, top + 10), title.replace("\n", " "), INK, font, anchor="lm")
        for x, y, wide, *_ in tokens:
            draw.rounded_rectangle((x, y, x + wide, y + HIGH - 4), 4, MASK)
    for index, fill in enumerate(COLOURS):
        right = width - PAD - 26 * (len(COLOURS) - 1 - index)
        draw.rounded_rectangle((right - 24, low - 7, right, low + 7), 3, fill)

    palette = Image.new("P", (1, 1))
    palette.putpalette(shades())
    frames = []
    for step in range(steps + 1):  # each is drawn over the one before
        draw.rectangle((PAD, low - 8, width / 2, low + 8), PAPER)
        draw.text((PAD, low), f"step {step} of {steps}", SOFT, font, anchor="lm")
        for x, y, wide, label, shown, paint in (token for _, _, tokens in laid for token in tokens):
            if shown == step:
                draw.rounded_rectangle((x, y, x + wide, y + HIGH - 4), 4, paint or PAPER)
                draw.text((x + wide / 2, y + HIGH / 2 - 2), label, INK if paint else SOFT, font, anchor="mm")
        frames.append(image.quantize(palette=palette, dither=Image.Dither.NONE))
    durations = [round(1000 * step_seconds(steps))] * steps + [round(1000 * SECONDS_AT_THE_END)]
    file = io.BytesIO()
    frames[0].save(file, "GIF", save_all=True, append_images=frames[1:], duration=durations, loop=0)
    return file.getvalue()
