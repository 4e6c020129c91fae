"""Tables as text: for the terminal, and in Markdown."""

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


def markdown_table(header: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """A Markdown table, one line per row, each with a newline at its end; ValueError if a row has not as many cells as
    the header."""
    lines = zip(*zip(header, ["---"] * len(header), *rows, strict=True), strict=True)
    return "".join("| " + " | ".join(line) + " |\n" for line in lines)
