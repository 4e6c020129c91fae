"""Tables of text in the terminal."""

from __future__ import annotations

from collections.abc import Sequence


def aligned_table(header: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """A table for a terminal: one line per row; columns are as wide as their longest cell, and two spaces apart."""
    widths = [max(map(len, column)) for column in zip(header, *rows, strict=True)]
    text = ""
    for row in (header, *rows):
        cells = [cell.ljust(width) for cell, width in zip(row, widths, strict=True)]
        text += "  ".join(cells).rstrip() + "\n"
    return text
