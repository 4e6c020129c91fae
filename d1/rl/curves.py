"""Plot the curves of diffu-GRPO runs from the trainer's logs, or write an HTML report on what RL did.

    python diffu-grpo/plot_curves.py runs/gsm8k runs/countdown --output curves.png
    python diffu-grpo/plot_curves.py runs/gsm8k --html report.html

There are four panels, as in d1's figure of training: reward, accuracy (training, and validation as dashed lines), KL to
the reference, and completion length, each against the number of rollouts. The report has these panels and the settings.
For runs with `--report true`, it also shows the same problems before and after the run, and whether each is solved.
"""

from __future__ import annotations

import argparse
import html
import json
import sys
from functools import partial
from pathlib import Path
from statistics import fmean
from typing import Any

from matplotlib.axes import Axes

from d1.runs.entry import OneLineParser
from d1.show.curves import legend, panel_svg, panels, running_mean, save_figure
from d1.show.film import Film, verdict, without_folders
from d1.show.page import Scene, film_page

PANELS = {
    "reward": "reward",
    "rewards/accuracy/mean": "accuracy (strict)",
    "kl": "KL to the reference",
    "completions/mean_length": "tokens to the first EOS",
}
SMOOTH = 5  # points in the running mean
SHOWN_FILE = "shown_problems.json"  # written by `shown_problems.py`


def make_parser() -> argparse.ArgumentParser:
    parser = OneLineParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("runs", nargs="+", help="output folders of diffu_grpo_train.py")
    parser.add_argument("--output", help="the PNG to write (default: curves.png, if --html is not given)")
    parser.add_argument("--html", type=Path, help="write a report: curves, settings, completions before and after")
    return parser


def read_run(folder: Path) -> tuple[list[dict[str, Any]], float]:
    """The log entries of a run, and its optimizer steps per rollout. Raises FileNotFoundError if the folder holds no
    run, or a run without a checkpoint."""
    states = [folder / "trainer_state.json", *folder.glob("checkpoint-*/trainer_state.json")]
    states = [state for state in states if state.exists()]
    if not states or not (folder / "run.json").exists():
        raise FileNotFoundError(f"{folder} holds no run of diffu_grpo_train.py with a checkpoint")
    history = max((json.loads(state.read_text())["log_history"] for state in states), key=len)
    settings = json.loads((folder / "run.json").read_text())["settings"]
    micro_steps = settings["steps_per_generation"] * settings["num_iterations"]
    return history, micro_steps / settings["gradient_accumulation_steps"]


def series(history: list[dict[str, Any]], name: str, steps_a_rollout: float) -> tuple[list[float], list[float]]:
    """Number of rollouts so far and value of every log entry that has a value for `name`."""
    points = [(entry["step"] / steps_a_rollout, float(entry[name])) for entry in history if entry.get(name) is not None]
    return [x for x, _ in points], [y for _, y in points]


def draw(runs: list[Path], labels: list[str], output: Path) -> None:
    """Writes a PNG of the panels."""
    figure, axes = panels(2, 2, size=(11, 7))
    for axis, name in zip(axes, PANELS, strict=True):
        draw_panel(axis, name, runs, labels)
    legend(figure)
    save_figure(figure, output)


def draw_panel(axis: Axes, name: str, runs: list[Path], labels: list[str]) -> None:
    """The smoothed curves of one metric, one line per run; validation, if there is one, is dashed."""
    for run, label in zip(runs, labels, strict=True):
        history, steps_a_rollout = read_run(run)
        x, y = series(history, name, steps_a_rollout)
        (line,) = axis.plot(x, running_mean(y, SMOOTH), label=label)
        if name != "kl":
            axis.plot(*series(history, f"eval_{name}", steps_a_rollout), "--", color=line.get_color(), alpha=0.7)
    axis.set(title=PANELS[name], xlabel="rollouts")


def report_page(runs: list[Path], labels: list[str]) -> str:
    """The HTML report on some runs: curves, settings, and the same problems before and after."""
    panel = partial(draw_panel, runs=runs, labels=labels)
    figures = [panel_svg(partial(panel, name=name), PANELS[name], f"panel{i}") for i, name in enumerate(PANELS)]
    curves = "".join(f"<figure>{figure}</figure>" for figure in figures)
    about = "".join(map(about_run, runs, labels))
    scenes = [scene for run, label in zip(runs, labels, strict=True) for scene in scenes_of(run, label)]
    lacking = "" if scenes else "<p>Problems before and after are kept by runs with <code>--report true</code>.</p>"
    title = f"What RL did: {', '.join(labels)}"
    return film_page(title, scenes, f'<div class="curves">{curves}</div>{about}{lacking}')


def about_run(run: Path, label: str) -> str:
    """The panels' metrics, as means over the first and the last tenth of the logs, and all settings, collapsed."""
    history, steps_a_rollout = read_run(run)
    label = html.escape(label)
    stats = f"<li>{label}, first and last tenth of the run:</li>"
    for name, title in PANELS.items():
        if values := series(history, name, steps_a_rollout)[1]:
            tenth = max(1, len(values) // 10)
            before, after = fmean(values[:tenth]), fmean(values[-tenth:])
            stats += f"<li><span>{html.escape(title)}</span> <b>{before:.3g} → {after:.3g}</b></li>"
    if pairs := films_of(run):
        before, after = (sum(film.solved is True for film in films) for films in zip(*pairs, strict=True))
        stats += f"<li><span>solved of the {len(pairs)} problems below</span> <b>{before} → {after}</b></li>"
    settings = json.loads((run / "run.json").read_text())["settings"]
    rows = [
        f"<li><b>{html.escape(name)}</b> {html.escape(without_folders(value))}</li>" for name, value in settings.items()
    ]
    folded = f'<summary>Settings of {label}</summary><ul class="settings">{"".join(rows)}</ul>'
    return f'<ul class="stats">{stats}</ul><details>{folded}</details>'


def films_of(run: Path) -> list[tuple[Film, Film]]:
    """The same problems before and after a run; empty if the run did not keep both."""
    kept = json.loads((run / SHOWN_FILE).read_text()) if (run / SHOWN_FILE).exists() else {}
    pairs = zip(kept.get("before", ()), kept.get("after", ()), strict=False)
    return [(Film(**before), Film(**after)) for before, after in pairs]


def scenes_of(run: Path, label: str) -> list[Scene]:
    """One scene per problem, whose title says whether it was solved."""
    return [
        (f"{label}, problem {number}: {verdict(pair[0])} before, {verdict(pair[1])} after", pair)
        for number, pair in enumerate(films_of(run), 1)
    ]


def main(args: argparse.Namespace) -> None:
    runs = [Path(run) for run in args.runs]
    labels = [run.name for run in runs]
    if args.html:
        args.html.write_text(report_page(runs, labels), encoding="utf-8")
    if args.output or not args.html:
        draw(runs, labels, Path(args.output or "curves.png"))
    for path in filter(None, (args.html, args.output or (not args.html and "curves.png"))):
        sys.stderr.write(f"Written: {Path(path).resolve()} ({', '.join(PANELS.values())} of {', '.join(labels)})\n")
