"""An animated picture of a rollout: a puzzle being denoised, token by token, coloured by confidence.

The SVG holds no script and needs no other file: CSS alone moves it, so web pages may show it as an image. Without
animation (or where a reader asks for reduced motion) it shows the finished canvas.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from xml.sax.saxutils import escape

COLOURS = ("#f2a65a", "#f0c869", "#c9d47a", "#8fcf9a", "#5fc3b0")  # from unsure to sure, each under dark text
SECONDS_A_STEP, SECONDS_AT_THE_END = 0.45, 3.0
PAD, CELL, CHIP, LINE = 16, 44, 66, 44  # pixels: margin, grid cell, width of a token's chip, height of a line
STYLE = """\
text{font-family:ui-monospace,Menlo,Consolas,monospace;text-anchor:middle;dominant-baseline:central;fill:#1b1f24}
.card{fill:#ffffff;stroke:#d0d7de}.cell{fill:none;stroke:#8c959f}.box{fill:none;stroke:#57606a;stroke-width:2}
.mask{fill:#e4e8ec}.page,.page text{fill:#57606a}.given{fill:#24292f;font-weight:bold}
@media(prefers-color-scheme:dark){.card{fill:#161b22;stroke:#30363d}.cell{stroke:#57606a}.box{stroke:#8b949e}
.mask{fill:#2b323b}.page,.page text{fill:#9da7b1}.given{fill:#f0f6fc}}
@media(prefers-reduced-motion:reduce){*{animation:none!important}}
"""


def colour(logp: float) -> str:
    """The colour of a token's probability, from `COLOURS` in equal parts of [0, 1]."""
    return COLOURS[min(len(COLOURS) - 1, int(math.exp(min(logp, 0.0)) * len(COLOURS)))]


def denoise_svg(
    tokens: Sequence[str],
    reveal_steps: Sequence[int],
    logps: Sequence[float],
    givens: Sequence[str],
    places: Mapping[int, int],
    line: int = 8,
) -> str:
    """The picture of one row of a `d1.sampling.Rollout`: a square grid, and beside it the canvas.

    Args:
        tokens: text of each token of the canvas; "" is drawn as an empty chip.
        reveal_steps: the step that revealed each, from 0; tokens of one step appear together, and those that no step
            revealed (-1), because the text had ended, with the last.
        logps: their log-probabilities in that step.
        givens: text of the grid's cells, row by row; "" where a cell is to be filled.
        places: cell -> the token that fills it, whose last character is what the cell then shows.
        line: tokens in a line of the canvas, e.g. the block length.

    Raises:
        ValueError: numbers of tokens, steps and log-probs that differ, or a grid that is not square.
    """
    if not len(tokens) == len(reveal_steps) == len(logps) > 0:
        raise ValueError(
            f"{len(tokens)} tokens, {len(reveal_steps)} reveal steps and {len(logps)} log-probs must agree"
        )
    side = math.isqrt(len(givens))
    if side * side != len(givens) or not side:
        raise ValueError(f"a grid of {len(givens)} cells is not square")
    last = max(reveal_steps)
    shown_in = [step if step >= 0 else last for step in reveal_steps]
    order = {step: index for index, step in enumerate(sorted(set(shown_in)), start=1)}
    when = [order[step] for step in shown_in]
    lines = math.ceil(len(tokens) / line)
    left = 2 * PAD + side * CELL
    width, height = left + line * CHIP + PAD, 2 * PAD + max(side * CELL, lines * LINE) + 24

    parts = [f'<rect class="card" x=".5" y=".5" width="{width - 1}" height="{height - 1}" rx="10"/>']
    parts += _grid(side, givens, {cell: (tokens[of], logps[of], when[of]) for cell, of in places.items()})
    parts += _canvas(left, line, tokens, logps, when)
    return _document(width, height, parts + _captions(len(order), width, height), len(order))


def _grid(side: int, givens: Sequence[str], filled: Mapping[int, tuple[str, float, int]]) -> list[str]:
    """The puzzle; `filled` says of each cell that a token fills the token, its log-prob and the picture's step."""
    parts = []
    for cell, given in enumerate(givens):
        x, y = PAD + cell % side * CELL, PAD + cell // side * CELL
        parts.append(f'<rect class="cell" x="{x}" y="{y}" width="{CELL}" height="{CELL}"/>')
        middle = x + CELL // 2, y + CELL // 2
        if given:
            parts.append(_text(given, *middle, 22, "given"))
        elif cell in filled:
            token, logp, step = filled[cell]
            shape = f'<rect x="{x + 3}" y="{y + 3}" width="{CELL - 6}" height="{CELL - 6}" rx="5"'
            shown = f'{shape} fill="{colour(logp)}"/>{_text(token[-1:], *middle, 22)}'
            parts.append(f'<g class="s{step}">{shown}</g>')
    box = math.isqrt(side)
    if box * box == side:
        for index in range(side):
            x, y = PAD + index % box * box * CELL, PAD + index // box * box * CELL
            parts.append(f'<rect class="box" x="{x}" y="{y}" width="{box * CELL}" height="{box * CELL}"/>')
    return parts


def _canvas(left: int, line: int, tokens: Sequence[str], logps: Sequence[float], when: Sequence[int]) -> list[str]:
    """The tokens in lines, from column `left` on, each over the grey chip that it replaces in its step."""
    parts = []
    for index, token in enumerate(tokens):
        x, y = left + index % line * CHIP + 2, PAD + index // line * LINE + 3
        chip = f'x="{x}" y="{y}" width="{CHIP - 4}" height="{LINE - 6}" rx="5"'
        size = min(18.0, (CHIP - 8) / (0.6 * max(len(token), 1)))
        shown = _text(token, x + CHIP // 2 - 2, y + LINE // 2 - 3, size) if token else ""
        parts.append(f'<rect class="mask" {chip}/>')
        parts.append(f'<g class="s{when[index]}"><rect {chip} fill="{colour(logps[index])}"/>{shown}</g>')
    return parts


def _text(text: str, x: float, y: float, size: float, kind: str = "") -> str:
    name = f' class="{kind}"' if kind else ""
    return f'<text{name} x="{x:g}" y="{y:g}" font-size="{size:.3g}">{escape(text)}</text>'


def _captions(steps: int, width: int, height: int) -> list[str]:
    """The step's number, below the grid, and what the colours mean."""
    y = height - PAD
    found = []
    for step in range(1, steps + 1):
        hidden = "" if step == steps else ' opacity="0"'  # unless animated, the last one alone is seen
        counted = _text(f"step {step} of {steps}", PAD + 2 * CELL, y, 14)
        found.append(f'<g class="page c{step}"{hidden}>{counted}</g>')
    start = width - PAD - 5 * 26 - 40
    found += [
        f'<rect x="{start + 26 * index}" y="{y - 7}" width="24" height="14" rx="3" fill="{fill}"/>'
        for index, fill in enumerate(COLOURS)
    ]
    found.append(f'<g class="page">{_text("unsure", start - 34, y, 14)}{_text("sure", start + 5 * 26 + 20, y, 14)}</g>')
    return found


def _document(width: int, height: int, parts: list[str], steps: int) -> str:
    """One animation a step: what it reveals is hidden before it, and again at the end of the loop."""
    seconds = (steps + 1) * SECONDS_A_STEP + SECONDS_AT_THE_END
    rules = []
    for step in range(1, steps + 1):
        start = 100 * step * SECONDS_A_STEP / seconds
        until = 100.0 if step == steps else 100 * (step + 1) * SECONDS_A_STEP / seconds
        rules.append(f"@keyframes s{step}{{0%,{start:.2f}%{{opacity:0}}{start + 1.5:.2f}%,100%{{opacity:1}}}}")
        rules.append(f"@keyframes c{step}{{0%,{start:.2f}%{{opacity:0}}{start + 0.01:.2f}%,{until:.2f}%{{opacity:1}}")
        rules.append("}" if step == steps else f"{until + 0.01:.2f}%,100%{{opacity:0}}}}")
        rules.append(
            f".s{step}{{animation:s{step} {seconds:g}s infinite}}.c{step}{{animation:c{step} {seconds:g}s infinite}}\n"
        )
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" width="{width}" height="{height}">\n'
        f"<title>A puzzle being denoised</title>\n<style>\n{STYLE}{''.join(rules)}</style>\n"
        + "\n".join(parts)
        + "\n</svg>\n"
    )
