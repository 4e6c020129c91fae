"""What animated pictures share: CSS alone moves them, without a script, so web pages may show them as images. Without
animation (or where a reader asks for reduced motion) they show the finished canvas."""

from __future__ import annotations

from collections.abc import Sequence
from xml.sax.saxutils import escape

from d1.show.film import COLOURS

PAD = 16  # pixels, around everything
SECONDS_A_STEP, SECONDS_OF_STEPS, SECONDS_AT_THE_END = 0.45, 16.0, 3.0
STYLE = """\
text{font-family:ui-monospace,Menlo,Consolas,monospace;text-anchor:middle;dominant-baseline:central;fill:#1b1f24}
.card{fill:#ffffff;stroke:#d0d7de}.cell{fill:none;stroke:#8c959f}.box{fill:none;stroke:#57606a;stroke-width:2}
.mask{fill:#e4e8ec}.page,.page text{fill:#57606a}.given{fill:#24292f;font-weight:bold}
@media(prefers-color-scheme:dark){.card{fill:#161b22;stroke:#30363d}.cell{stroke:#57606a}.box{stroke:#8b949e}
.mask{fill:#2b323b}.page,.page text{fill:#9da7b1}.given{fill:#f0f6fc}}
@media(prefers-reduced-motion:reduce){*{animation:none!important}}
"""


def step_seconds(steps: int) -> float:
    """How long each of so many steps stays."""
    return min(SECONDS_A_STEP, SECONDS_OF_STEPS / steps)


def card(width: float, height: float) -> str:
    return f'<rect class="card" x=".5" y=".5" width="{width - 1:g}" height="{height - 1:g}" rx="10"/>'


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
