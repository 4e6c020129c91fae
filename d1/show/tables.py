"""Tables in Markdown."""

from __future__ import annotations

from collections.abc import Sequence


def markdown_table(header: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """A Markdown table, one line per row, each with a newline at its end; ValueError if a row has not as many cells as
    the header."""
    lines = zip(*zip(header, ["---"] * len(header), *rows, strict=True), strict=True)
    return "".join("| " + " | ".join(line) + " |\n" for line in lines)
