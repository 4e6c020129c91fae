"""Films as one HTML page with buttons to play and pause and a slider (see `page.html` and `page.js`).

The page is self-contained and works offline. Its security policy allows only its own script, so a model's text, which
is inserted as data, stays text.
"""

from __future__ import annotations

import base64
import hashlib
import html
import json
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from d1.show.film import COLOURS, Film, chip, visible

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
        "board": film.board,
        "seconds": [round(seconds, 3) for seconds in film.seconds],
    }
