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
    connect = "; connect-src 'self'" if script else ""
    script = (HERE / "page.js").read_text(encoding="utf-8") + script
    digest = base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()
    data = json.dumps([{"title": name, "films": [film_data(film) for film in films]} for name, films in scenes])
    values = {
        "TITLE": html.escape(visible(title).replace("\n", " ")),
        "COLOURS": "".join(f"--q{index}:{fill};" for index, fill in enumerate(COLOURS)),
        "SCRIPT_HASH": f"sha256-{digest}",
        "SCRIPT": script,
        "CONNECT": connect,
        "BEFORE": before,
        "DATA": data.replace("<", "\\u003c"),  # so that a model's text cannot end the element that holds it
    }
    # In a single pass, so that a marker inside a text is not replaced.
    return re.sub("@@([A-Z_]+)@@", lambda marker: values[marker[1]], (HERE / "page.html").read_text(encoding="utf-8"))


def film_data(film: Film) -> dict[str, Any]:
    """A film as the page's script reads it; `tokens` are (spaces before, text, line ends after)."""
    drafts = []
    for position_drafts in film.drafts:
        rows: list[list[Any]] = []
        for step, text, logp, *end in position_drafts:
            rows.append([step + 1, chip(text)[1], round(max(logp, -99.0), 3), *(last + 1 for last in end)])
        drafts.append(rows)
    return {
        "title": visible(film.title),
        "note": visible(film.note),
        "prompt": "\n".join(visible(line) for line in film.prompt.split("\n")),
        "tokens": [chip(token) for token in film.tokens],
        "steps": film.steps,
        "drafts": drafts,
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
# In pixels
CHARACTER_WIDTH = 9.0
LINE_HEIGHT = 26
FONT_SIZE = 14
TITLE_HEIGHT = 30  # above each film
FOOT_HEIGHT = 24  # below all films
PADDING = 16  # around everything
# In seconds
MAX_STEP_SECONDS = 0.45  # of one step
MAX_STEPS_SECONDS = 16.0  # of all steps together
END_SECONDS = 3.0  # after the last step
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


def wrap_tokens(tokens: Sequence[str], columns: int = COLUMNS) -> list[Box]:
    """Tokens as running text in lines of `columns` characters; a token that is longer than a line is cut."""
    boxes, line, column = [], 0, 0
    for token in tokens:
        gap, label, breaks = chip(token)
        if cell_len(label) > columns:
            label = set_cell_size(label, columns - 1) + "…"
        width = max(cell_len(label), 1)
        if column > 0:
            column += gap
        if column + width > columns:
            line += 1
            column = 0
        boxes.append(Box(line, column, width, label))
        if breaks:
            line += breaks
            column = 0
        else:
            column += width
    return boxes


def text_element(text: str, x: float, y: float, kind: str = "") -> str:
    """Text centred at a point."""
    name = f' class="{kind}"' if kind else ""
    return f'<text{name} x="{x:g}" y="{y:g}" font-size="{FONT_SIZE}">{escape(text)}</text>'


def captions(steps: int, width: float, y: float) -> list[str]:
    """The text at the bottom: the step's number, and the meaning of the colours."""
    elements = []
    for step in range(1, steps + 1):
        hidden = "" if step == steps else ' opacity="0"'  # without animation, only the last one is visible
        caption = text_element(f"step {step} of {steps}", PADDING + 60, y)
        elements.append(f'<g class="page c{step}"{hidden}>{caption}</g>')
    start = width - PADDING - 5 * 26 - 40
    for index, fill in enumerate(COLOURS):
        shape = f'x="{start + 26 * index:g}" y="{y - 7:g}" width="24" height="14" rx="3"'
        elements.append(f'<rect {shape} fill="{fill}"/>')
    ends = text_element("unsure", start - 34, y) + text_element("sure", start + 5 * 26 + 20, y)
    return [*elements, f'<g class="page">{ends}</g>']


def keyframes(steps: int) -> str:
    """Animation rules: groups of class `s1`, ... appear with that step, those of `c1`, ... are shown in it alone."""
    step_seconds = min(MAX_STEP_SECONDS, MAX_STEPS_SECONDS / steps)
    seconds = (steps + 1) * step_seconds + END_SECONDS
    rules = []
    for step in range(1, steps + 1):
        start = 100 * step * step_seconds / seconds
        end = 100.0 if step == steps else 100 * (step + 1) * step_seconds / seconds
        rules.append(f"@keyframes s{step}{{0%,{start:.2f}%{{opacity:0}}{start + 1.5:.2f}%,100%{{opacity:1}}}}")
        rules.append(f"@keyframes c{step}{{0%,{start:.2f}%{{opacity:0}}{start + 0.01:.2f}%,{end:.2f}%{{opacity:1}}")
        rules.append("}" if step == steps else f"{end + 0.01:.2f}%,100%{{opacity:0}}}}")
        rules.append(
            f".s{step}{{animation:s{step} {seconds:g}s infinite}}.c{step}{{animation:c{step} {seconds:g}s infinite}}\n"
        )
    return "".join(rules)


def film_svg(films: Sequence[Film]) -> str:
    """An animated SVG for a document: films below each other, each under its title, which play their steps together.

    Tokens appear over the grey chips that hide them, in the colour of their confidence; a corrected one in a frame.
    """
    elements = []
    top = float(PADDING)
    for film in films:
        title = visible(film.title)
        elements.append(text_element(title, PADDING + cell_len(title) * FONT_SIZE * 0.3, top + 10, "given"))

        # A chip per position: the mask, its drafts, and its token, each of which covers those before it.
        boxes = wrap_tokens(film.tokens)
        columns = zip(boxes, film.steps, film.logps, film.shown_by(), strict=True)
        for position, (box, step, logp, shown) in enumerate(columns):
            x = PADDING + box.column * CHARACTER_WIDTH
            y = top + TITLE_HEIGHT + box.line * LINE_HEIGHT
            box_width = box.width * CHARACTER_WIDTH - 1.5
            centre_x = x + box_width / 2
            centre_y = y + LINE_HEIGHT / 2 - 2
            shape = f'x="{x:g}" y="{y:g}" width="{box_width:g}" height="{LINE_HEIGHT - 4}" rx="4"'
            elements.append(f'<rect class="mask" {shape}/>')
            drafts = film.drafts_at(position)
            next_steps = [*(draft[0] + 1 for draft in drafts[1:]), shown]
            for (draft_step, draft, draft_logp, *end), next_step in zip(drafts, next_steps, strict=False):
                draft_label = text_element(set_cell_size(chip(draft)[1], box.width), centre_x, centre_y)
                fill = colour(draft_logp)
                elements.append(f'<g class="s{draft_step + 1}"><rect {shape} fill="{fill}"/>{draft_label}</g>')
                if end and end[0] + 1 < next_step:  # hidden again
                    elements.append(f'<g class="s{end[0] + 1}"><rect class="mask" {shape}/></g>')
            paint = 'class="card"' if step < 0 else f'fill="{colour(logp)}"'
            frame = f'<rect class="box" {shape}/>' if drafts else ""
            label = text_element(box.label, centre_x, centre_y, "page" if step < 0 else "")
            elements.append(f'<g class="s{shown}"><rect {shape} {paint}/>{frame}{label}</g>')
        top += TITLE_HEIGHT + (boxes[-1].line + 1) * LINE_HEIGHT + PADDING

    # The card around the films, and the text at the bottom.
    steps = max(film.passes for film in films)
    width = 2 * PADDING + COLUMNS * CHARACTER_WIDTH
    height = top + FOOT_HEIGHT
    size = f'viewBox="0 0 {width:g} {height:g}" width="{width:g}" height="{height:g}"'
    card = f'<rect class="card" x=".5" y=".5" width="{width - 1:g}" height="{height - 1:g}" rx="10"/>'
    body = "\n".join([card, *elements, *captions(steps, width, height - PADDING)])
    head = f"<title>A text being denoised</title>\n<style>\n{STYLE}{keyframes(steps)}</style>"
    return f'<svg xmlns="http://www.w3.org/2000/svg" {size}>\n{head}\n{body}\n</svg>\n'
