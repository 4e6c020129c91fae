"""Films as one HTML page with buttons to play and pause and a slider, or as an animated SVG of running text.

The page (see `page.html` and `page.js`) is self-contained and works offline. Its security policy allows only its own
script, so a model's text, which is inserted as data, stays text.
"""

from __future__ import annotations

import base64
import hashlib
import html
import json
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple
from xml.sax.saxutils import escape

from rich.cells import cell_len, set_cell_size

from d1.show.film import COLOURS, Film, chip, colour, visible

HERE = Path(__file__).parent
Scene = tuple[str, Sequence[Film]]  # a title, and films to play side by side under one bar


def film_page(title: str, scenes: Sequence[Scene], before: str = "", script: str = "") -> str:
    """The page of some scenes, one below the other. If there is only one scene, it plays when the page opens.

    Args:
        before: HTML to insert above the scenes.
        script: JavaScript to run after the page's; it may connect to the server of the page.
    """
    connect, script = "; connect-src 'self'" if script else "", (HERE / "page.js").read_text() + script
    digest = base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()
    data = json.dumps([{"title": name, "films": [film_data(film) for film in films]} for name, films in scenes])
    parts = {
        "TITLE": html.escape(visible(title).replace("\n", " ")),
        "COLOURS": "".join(f"--q{index}:{colour};" for index, colour in enumerate(COLOURS)),
        "SCRIPT_HASH": f"sha256-{digest}",
        "SCRIPT": script,
        "CONNECT": connect,
        "BEFORE": before,
        "DATA": data.replace("<", "\\u003c"),  # so that a model's text cannot end the element that holds it
    }
    # In a single pass, so that a marker inside a text is not replaced.
    return re.sub("@@([A-Z_]+)@@", lambda marker: parts[marker[1]], (HERE / "page.html").read_text())


def film_data(film: Film) -> dict[str, Any]:
    """A film as the page's script reads it; `tokens` are (spaces before, text, line ends after)."""
    return {
        "title": visible(film.title),
        "note": visible(film.note),
        "prompt": "\n".join(visible(line) for line in film.prompt.split("\n")),
        "tokens": [chip(token) for token in film.tokens],
        "steps": film.steps,
        "drafts": [
            [[step + 1, chip(text)[1], round(max(logp, -99.0), 3)] for step, text, logp in of] for of in film.drafts
        ],
        "at": film.shown_by(),
        "passes": film.passes,
        "logps": [round(max(logp, -99.0), 3) for logp in film.logps],
        "entropies": [round(entropy, 3) for entropy in film.entropies],
        "fed": film.fed,
        "solved": film.solved,
        "seconds": [round(seconds, 3) for seconds in film.seconds],
    }


# ---- the animated SVG

COLUMNS = 72  # characters per line
WIDE, HIGH, SIZE = 9.0, 26, 14  # pixels: width of a character, height of a line, font size
TITLE, FOOT, PAD = 30, 24, 16  # pixels: above each film, below all films, and around everything
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
    """Where a token is in running text: line and character where it begins, width in characters, and its label."""

    line: int
    column: int
    width: int
    label: str


def flow(tokens: Sequence[str], columns: int = COLUMNS) -> list[Box]:
    """Tokens as running text in lines of `columns` characters; a token that is longer than a line is cut."""
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


def written(text: str, x: float, y: float, kind: str = "") -> str:
    """Text centred at a point."""
    name = f' class="{kind}"' if kind else ""
    return f'<text{name} x="{x:g}" y="{y:g}" font-size="{SIZE}">{escape(text)}</text>'


def captions(steps: int, width: float, y: float) -> list[str]:
    """The text at the bottom: the step's number, and the meaning of the colours."""
    found = []
    for step in range(1, steps + 1):
        hidden = "" if step == steps else ' opacity="0"'  # without animation, only the last one is visible
        found.append(f'<g class="page c{step}"{hidden}>{written(f"step {step} of {steps}", PAD + 60, y)}</g>')
    start = width - PAD - 5 * 26 - 40
    for index, fill in enumerate(COLOURS):
        shape = f'x="{start + 26 * index:g}" y="{y - 7:g}" width="24" height="14" rx="3"'
        found.append(f'<rect {shape} fill="{fill}"/>')
    ends = written("unsure", start - 34, y) + written("sure", start + 5 * 26 + 20, y)
    return [*found, f'<g class="page">{ends}</g>']


def keyframes(steps: int) -> str:
    """Animation rules: groups of class `s1`, ... appear with that step, those of `c1`, ... are shown in it alone."""
    a_step = min(SECONDS_A_STEP, SECONDS_OF_STEPS / steps)
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
    return "".join(rules)


def film_svg(films: Sequence[Film]) -> str:
    """An animated SVG for a document: films below each other, each under its title, which play their steps together.

    Tokens appear over the grey chips that hide them, in the colour of their confidence; a corrected one in a frame.
    """
    parts, top = [], float(PAD)
    for film in films:
        title, boxes = visible(film.title), flow(film.tokens)
        parts.append(written(title, PAD + cell_len(title) * SIZE * 0.3, top + 10, "given"))
        tokens = zip(boxes, film.steps, film.logps, film.shown_by(), strict=True)
        # A chip per position: the mask, its drafts, and its token, each of which covers those before it.
        for position, (box, step, logp, shown) in enumerate(tokens):
            x, y, wide = PAD + box.column * WIDE, top + TITLE + box.line * HIGH, box.width * WIDE - 1.5
            shape = f'x="{x:g}" y="{y:g}" width="{wide:g}" height="{HIGH - 4}" rx="4"'
            paint = 'class="card"' if step < 0 else f'fill="{colour(logp)}"'
            text = written(box.label, x + wide / 2, y + HIGH / 2 - 2, "page" if step < 0 else "")
            parts.append(f'<rect class="mask" {shape}/>')
            for at, draft, unsure in film.drafts_at(position):
                old = written(set_cell_size(chip(draft)[1], box.width), x + wide / 2, y + HIGH / 2 - 2)
                parts.append(f'<g class="s{at + 1}"><rect {shape} fill="{colour(unsure)}"/>{old}</g>')
            mark = f'<rect class="box" {shape}/>' if film.drafts_at(position) else ""
            parts.append(f'<g class="s{shown}"><rect {shape} {paint}/>{mark}{text}</g>')
        top += TITLE + (boxes[-1].line + 1) * HIGH + PAD
    steps, width, height = max(film.passes for film in films), 2 * PAD + COLUMNS * WIDE, top + FOOT
    size = f'viewBox="0 0 {width:g} {height:g}" width="{width:g}" height="{height:g}"'
    card = f'<rect class="card" x=".5" y=".5" width="{width - 1:g}" height="{height - 1:g}" rx="10"/>'
    body = "\n".join([card, *parts, *captions(steps, width, height - PAD)])
    head = f"<title>A text being denoised</title>\n<style>\n{STYLE}{keyframes(steps)}</style>"
    return f'<svg xmlns="http://www.w3.org/2000/svg" {size}>\n{head}\n{body}\n</svg>\n'
