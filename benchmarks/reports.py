"""How a benchmark's results are written: as JSON, and as Markdown tables."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

from d1.show.tables import markdown_table


def results_table(rows: dict[str, dict[str, float]]) -> str:
    """A table with one row a name; a ratio stands with the lowest and the highest of its rounds."""
    columns = [name for name in next(iter(rows.values())) if name not in ("ratio_low", "ratio_high")]

    def cell(row: dict[str, float], column: str) -> str:
        if column != "ratio":
            return f"{row[column]:.4g}" if column in row else ""
        low, high = row["ratio_low"], row["ratio_high"]
        return f"{row['ratio']:.3f}" + (f" ({low:.3g} to {high:.3g})" if low < high else "")

    body = [[name, *(cell(row, column) for column in columns)] for name, row in rows.items()]
    return markdown_table(["", *(name.replace("_", " ") for name in columns)], body)


def as_markdown(report: dict[str, Any]) -> str:
    """A report's machine and settings in a line each, its tables, and its remarks."""
    parts = [", ".join(f"{key} {value}" for key, value in report[of].items()) + "  " for of in ("machine", "settings")]
    for key, value in report.items():
        if key == "remarks":
            parts += ["", *value]
        elif key not in ("machine", "settings"):
            parts += ["", *([] if key == "results" else [f"{key}:", ""]), results_table(value).rstrip()]
    return "\n".join(parts) + "\n"


def write_report(report: dict[str, Any], folder: str, name: str) -> None:
    """Writes `name.json` and `.md` into the folder, which is there, and prints the latter."""
    path = Path(folder)
    (path / f"{name}.json").write_text(json.dumps(report, indent=1))
    (path / f"{name}.md").write_text(as_markdown(report))
    sys.stdout.write(as_markdown(report))
