"""Plot the curves of diffu-GRPO runs from the trainer's logs, or write an HTML report on what RL did.

    python diffu-grpo/plot_curves.py runs/gsm8k runs/countdown --output curves.png
    python diffu-grpo/plot_curves.py runs/gsm8k --html report.html

The panels are those of d1's figure of training: reward, accuracy, KL to the reference, and completion length, each
against the number of rollouts; a metric that no run has logged has no panel. A thin line is each logged value, a bold
line the mean of the last 5, a dashed line validation. The report has these panels and the settings. For runs with
`--report true`, it also shows the same problems before and after the run, and whether each is solved.
"""

from __future__ import annotations

import html
import sys
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from statistics import fmean
from typing import Any

from matplotlib.axes import Axes
from matplotlib.ticker import MaxNLocator

from d1.files import read_object, valid_unicode
from d1.ranges import setting
from d1.runs.cli import SettingsParser
from d1.show.curves import WIDTH, legend, panel_svg, panels, running_mean, save_figure, widen
from d1.show.film import Film, labels_of, verdict, without_folders
from d1.show.page import Scene, film_page

PANELS = {  # a metric in the logs -> the title of its panel, in the report and the picture
    "reward": "reward",
    "rewards/accuracy/mean": "accuracy (strict)",
    "kl": "KL to the reference",
    "completions/mean_length": "tokens to the first EOS",
}
SMOOTH = 5  # points in the running mean
FEW = 30  # up to this number, points get markers, because a line alone hides them
LINES: dict[str, tuple[str, dict[str, Any]]] = {  # key -> what it shows of a metric, its style
    "thin": ("each logged value", {"linewidth": 0.8, "alpha": 0.6, "markersize": 3}),
    "bold": (f"mean of the last {SMOOTH}", {"linewidth": 1.8}),
    "dashed": ("validation", {"linestyle": "--", "marker": "o", "markersize": 3.5, "linewidth": 1.2}),
}
SHOWN_FILE = "shown_problems.json"  # written by `ShowProblems` (`d1/report.py`)
ORDER = """Below: the first problems of the validation data, or of the training data if the run has no validation.
Those that are solved only before or only after the run come first, then the others, each in the order of the data."""


@dataclass(frozen=True, kw_only=True)
class ReportFlags:
    runs: list[str] = setting(help="output folders of diffu_grpo_train.py", positional=True, nargs="+")
    output: Path | None = setting(None, "PNG or SVG (default: curves.png in the first run's folder)", type=Path)
    html: Path | None = setting(None, "write a report: curves, settings, completions before and after", type=Path)


def make_parser() -> SettingsParser[ReportFlags]:
    return SettingsParser(ReportFlags, about=__doc__)


def read_run(folder: Path) -> tuple[list[dict[str, Any]], float]:
    """The log entries of a run, and its optimizer steps per rollout.

    Raises:
        FileNotFoundError: the folder holds no run, or a run without a checkpoint.
        ValueError: a file is damaged, or the run is of another stage.
    """
    states = [*folder.glob("trainer_state.json"), *folder.glob("checkpoint-*/trainer_state.json")]
    if not states or not (folder / "run.json").exists():
        raise FileNotFoundError(f"{folder} holds no run of diffu_grpo_train.py with a checkpoint")
    newest = max(map(read_object, states), key=lambda state: state["global_step"])
    settings = read_object(folder / "run.json")["settings"]
    if "steps_per_generation" not in settings:
        raise ValueError(f"{folder} holds a run of another stage: name the output folders of diffu_grpo_train.py")
    micro_steps = settings["steps_per_generation"] * settings["num_iterations"]
    return newest["log_history"], micro_steps / settings["gradient_accumulation_steps"]


def series(history: list[dict[str, Any]], name: str, steps_per_rollout: float) -> tuple[list[float], list[float]]:
    """The number of rollouts so far, and the value, of every log entry that has a value for `name`."""
    entries = [entry for entry in history if entry.get(name) is not None]
    rollouts = [entry["step"] / steps_per_rollout for entry in entries]
    return rollouts, [float(entry[name]) for entry in entries]


def panels_of(runs: list[Path]) -> list[str]:
    """The metrics of `PANELS` that some run has logged."""
    entries = [entry for run in runs for entry in read_run(run)[0]]
    logged = {name for entry in entries for name, value in entry.items() if value is not None}
    return [name for name in PANELS if logged & {name, f"eval_{name}"}]


def draw(runs: list[Path], labels: list[str], output: Path) -> None:
    """Writes a picture of the panels, two in a row. Raises ValueError if the runs have logged no metric of a panel."""
    names = panels_of(runs)
    if not names:
        raise ValueError(f"nothing to plot: {', '.join(map(str, runs))} logged none of {', '.join(PANELS)}")
    rows = (len(names) + 1) // 2
    figure, axes = panels(rows, 2, size=(WIDTH, 2.2 * rows + 0.6))
    for axis, name in zip(axes, names, strict=False):
        draw_panel(axis, name, runs, labels)
    for axis in axes[len(names) :]:
        axis.remove()
    for label, style in LINES.values():
        axes[0].plot([], [], color="0.5", label=label, **style)
    legend(figure)
    save_figure(figure, output)


def draw_panel(axis: Axes, name: str, runs: list[Path], labels: list[str]) -> None:
    """The curves of one metric, one colour per run (see `LINES`)."""
    for run, label in zip(runs, labels, strict=True):
        history, steps_per_rollout = read_run(run)
        x, y = series(history, name, steps_per_rollout)
        thin, bold, dashed = (style for _, style in LINES.values())
        (line,) = axis.plot(x, running_mean(y, SMOOTH), label=label, **bold)
        axis.plot(x, y, color=line.get_color(), marker="o" if len(x) <= FEW else "", **thin)
        if name != "kl":
            axis.plot(*series(history, f"eval_{name}", steps_per_rollout), color=line.get_color(), **dashed)
    axis.set(title=PANELS[name], xlabel="rollouts")
    axis.xaxis.set_major_locator(MaxNLocator(integer=True, steps=[1, 2, 5, 10]))
    widen(axis)


def report_page(runs: list[Path], labels: list[str]) -> str:
    """The HTML report on some runs: curves, settings, and the same problems before and after."""
    panel = partial(draw_panel, runs=runs, labels=labels)
    names = panels_of(runs)
    figures = [panel_svg(partial(panel, name=name), PANELS[name], f"panel{i}") for i, name in enumerate(names)]
    curves = "".join(f"<figure>{figure}</figure>" for figure in figures)
    keys = "; ".join(f"{key}: {label}" for key, (label, _) in LINES.items())
    about = ""
    scenes: list[Scene] = []
    for run, label in zip(runs, labels, strict=True):
        about += about_run(run, label)
        scenes += scenes_of(run, label)
    below = ORDER
    if not scenes:
        below = "Problems before and after are kept by runs with <code>--report true</code>."
        stopped = [html.escape(label) for run, label in zip(runs, labels, strict=True) if read_films(run)]
        if stopped:
            below = f"No problems are shown, because these runs stopped before their last films: {', '.join(stopped)}."
    title = f"What RL did: {', '.join(labels)}"
    lines = f'<p class="note">Lines: {keys}.</p>' if curves else ""
    return film_page(title, scenes, f'<div class="curves">{curves}</div>{lines}{about}<p>{below}</p>')


def about_run(run: Path, label: str) -> str:
    """The panels' metrics, as means over the first and the last tenth of the logs, and all settings, collapsed."""
    history, steps_per_rollout = read_run(run)
    stats = f"<li>{html.escape(label)}, first and last tenth of the run:</li>"
    for name, title in PANELS.items():
        _, values = series(history, name, steps_per_rollout)
        if values:
            tenth = max(1, len(values) // 10)
            first, last = fmean(values[:tenth]), fmean(values[-tenth:])
            stats += f"<li><span>{html.escape(title)}</span> <b>{first:.3g} → {last:.3g}</b></li>"
    pairs = films_of(run)
    if pairs:
        solved_before = sum(before.solved is True for before, _ in pairs)
        solved_after = sum(after.solved is True for _, after in pairs)
        stats += f"<li><span>solved of the {len(pairs)} problems below</span> "
        stats += f"<b>{solved_before} → {solved_after}</b></li>"
    settings = read_object(run / "run.json")["settings"]
    shown = {html.escape(name): html.escape(without_folders(value)) for name, value in settings.items()}
    rows = "".join(f"<li><b>{name}</b> {value}</li>" for name, value in shown.items())
    folded = f'<summary>Settings of {html.escape(label)}</summary><ul class="settings">{rows}</ul>'
    return f'<ul class="stats">{stats}</ul><details>{folded}</details>'


def read_films(run: Path) -> dict[str, list[dict[str, Any]]]:
    """The films that a run kept, by "before" and "after"; a run that was stopped has no "after"."""
    file = run / SHOWN_FILE
    if not file.exists():
        return {}
    return read_object(file)


def films_of(run: Path) -> list[tuple[Film, Film]]:
    """The same problems before and after a run; empty if the run did not keep both."""
    films = read_films(run)
    pairs = zip(films.get("before", ()), films.get("after", ()), strict=False)
    return [(Film(**before), Film(**after)) for before, after in pairs]


def scenes_of(run: Path, label: str) -> list[Scene]:
    """One scene per problem, whose title says whether it was solved, in the order that `ORDER` states."""
    changed: list[Scene] = []
    unchanged: list[Scene] = []
    for number, (before, after) in enumerate(films_of(run), 1):
        title = f"{label}, problem {number}: {verdict(before)} before, {verdict(after)} after"
        scenes = unchanged if before.solved == after.solved else changed
        scenes.append((title, (before, after)))
    return changed + unchanged


def main(args: ReportFlags) -> None:
    if args.output and not args.output.suffix:
        raise ValueError(f"--output {args.output} is no PNG or SVG: name a file, such as {args.output / 'curves.png'}")
    runs = [Path(run) for run in args.runs]
    labels = labels_of(runs)
    if args.html:
        args.html.write_text(valid_unicode(report_page(runs, labels)), encoding="utf-8")
    picture = args.output
    if not picture and not args.html:
        picture = runs[0] / "curves.png"
    if picture:
        draw(runs, labels, picture)
    for path in (args.html, picture):
        if path:
            sys.stderr.write(f"Written: {path.resolve()}\n")
