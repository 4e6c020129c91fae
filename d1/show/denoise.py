"""An animated picture of a rollout: a puzzle being denoised, token by token, coloured by confidence."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

from d1.show.film import Film, colour
from d1.show.svg import PAD, captions, card, document, written

CELL, CHIP, LINE = 44, 66, 44  # pixels: grid cell, width of a token's chip, height of a line


def denoise_svg(film: Film, givens: Sequence[str], places: Mapping[int, int], line: int = 8) -> str:
    """The picture of a film: a square grid, and beside it the canvas. Steps that revealed nothing are left out.

    Args:
        givens: text of the grid's cells, row by row; "" where a cell is to be filled.
        places: cell -> the token that fills it, whose last character is what the cell then shows.
        line: tokens in a line of the canvas, e.g. the block length.

    Raises:
        ValueError: a grid that is not square.
    """
    side = math.isqrt(len(givens))
    if side * side != len(givens) or not side:
        raise ValueError(f"a grid of {len(givens)} cells is not square")
    shown_by = film.shown_by()
    order = {step: index for index, step in enumerate(sorted(set(shown_by)), start=1)}
    when = [order[step] for step in shown_by]
    lines = math.ceil(len(film.tokens) / line)
    left = 2 * PAD + side * CELL
    width, height = left + line * CHIP + PAD, 2 * PAD + max(side * CELL, lines * LINE) + 24

    filled = {cell: (film.tokens[of], film.logps[of], when[of]) for cell, of in places.items()}
    parts = [card(width, height), *_grid(side, givens, filled), *_canvas(left, line, film, when)]
    parts += captions(len(order), width, height, PAD + 2 * CELL)
    return document(width, height, parts, len(order), "A puzzle being denoised")


def _grid(side: int, givens: Sequence[str], filled: Mapping[int, tuple[str, float, int]]) -> list[str]:
    """The puzzle; `filled` says of each cell that a token fills the token, its log-prob and the picture's step."""
    parts = []
    for cell, given in enumerate(givens):
        x, y = PAD + cell % side * CELL, PAD + cell // side * CELL
        parts.append(f'<rect class="cell" x="{x}" y="{y}" width="{CELL}" height="{CELL}"/>')
        middle = x + CELL // 2, y + CELL // 2
        if given:
            parts.append(written(given, *middle, 22, "given"))
        elif cell in filled:
            token, logp, step = filled[cell]
            shape = f'<rect x="{x + 3}" y="{y + 3}" width="{CELL - 6}" height="{CELL - 6}" rx="5"'
            shown = f'{shape} fill="{colour(logp)}"/>{written(token[-1:], *middle, 22)}'
            parts.append(f'<g class="s{step}">{shown}</g>')
    box = math.isqrt(side)
    if box * box == side:
        for index in range(side):
            x, y = PAD + index % box * box * CELL, PAD + index // box * box * CELL
            parts.append(f'<rect class="box" x="{x}" y="{y}" width="{box * CELL}" height="{box * CELL}"/>')
    return parts


def _canvas(left: int, line: int, film: Film, when: Sequence[int]) -> list[str]:
    """The tokens in lines, from column `left` on, each over the grey chip that it replaces in its step."""
    parts = []
    for index, (token, logp) in enumerate(zip(film.tokens, film.logps, strict=True)):
        x, y = left + index % line * CHIP + 2, PAD + index // line * LINE + 3
        chip = f'x="{x}" y="{y}" width="{CHIP - 4}" height="{LINE - 6}" rx="5"'
        size = min(18.0, (CHIP - 8) / (0.6 * max(len(token), 1)))
        shown = written(token, x + CHIP // 2 - 2, y + LINE // 2 - 3, size) if token else ""
        parts.append(f'<rect class="mask" {chip}/>')
        parts.append(f'<g class="s{when[index]}"><rect {chip} fill="{colour(logp)}"/>{shown}</g>')
    return parts
